//! Errors that NVIDIA's driver has reported of a GPU in the Linux kernel's log (Xid; NVIDIA "Xid Errors", r580).

use std::io::{ErrorKind, Read as _};

use crate::{Host, PciAddress, files};

/// An error that NVIDIA's driver has reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Xid {
    /// Its number in NVIDIA's list: 79 is a GPU that has fallen off the bus.
    pub number: u32,
    /// What the driver said of it.
    pub text: String,
}

/// Advice by Xid number, causes before consequences: after 79, the driver also logs 154 and errors of the programs that it ends.
const ADVICE: &[(&[u32], &str)] = &[
    (&[79], "check the power plugs and the cable; then run `vm-service egpu reset --reconnect`"),
    (
        &[48, 63, 64, 94, 95],
        "its memory has errors: reset it (`vm-service egpu reset`); if `nvidia-smi -q -d ECC,ROW_REMAPPER` shows more of them, \
         replace it",
    ),
    (&[119, 120], "reset it (`vm-service egpu reset --hard`); if the Xid recurs, update NVIDIA's driver"),
    (&[154], "do what the message names: reset it (`vm-service egpu reset --hard`), or reboot the host"),
    (&[13, 31, 43, 45], "a program caused it: see that program's log"),
];

/// Which of the errors of a GPU caused the others, and what to do about it; `None` where there is no error.
pub fn advise(xids: &[Xid]) -> Option<(&Xid, &'static str)> {
    let of = |(numbers, advice): &(&[u32], &'static str)| {
        xids.iter().rev().find(|xid| numbers.contains(&xid.number)).map(|xid| (xid, *advice))
    };
    let unknown = || Some((xids.last()?, "see NVIDIA's list of Xid errors"));
    ADVICE.iter().find_map(of).or_else(unknown)
}

/// Most records of the log that are read, and the longest of them (`PRINTKRB_RECORD_MAX` of Linux's `kernel/printk/printk.c`
/// with its prefix).
const RECORDS: usize = 100_000;
const LONGEST: usize = 8 << 10;
/// Most characters of a message that are kept.
const KEPT: usize = 200;

/// What the log of the Linux kernel has of a GPU's errors, the oldest first. Nothing where the log can't be read, as by others
/// than root.
pub fn xids(host: &Host, address: PciAddress) -> Vec<Xid> {
    let path = host.dev.join("kmsg");
    let Ok(mut log) = files::open(&path) else { return Vec::new() };
    let (mut record, mut text) = ([0; LONGEST], Vec::new());
    for _ in 0..RECORDS {
        match log.read(&mut record) {
            Ok(0) => break,
            Ok(length) => text.extend_from_slice(&record[..length]),
            // Records were overwritten meanwhile.
            Err(error) if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::Interrupted) => {}
            Err(_) => break,
        }
    }
    of(&String::from_utf8_lossy(&text), address)
}

/// Those of a log's records: `PREFIX;NVRM: Xid (PCI:0000:32:00): 79, pid=1, GPU has fallen off the bus.`
fn of(log: &str, address: PciAddress) -> Vec<Xid> {
    let place = address.to_string();
    let place = place.rsplit_once('.').map_or(&*place, |(slot, _)| slot);
    let xid = |line: &str| {
        let (prefix, message) = line.split_once(';')?;
        // A process that writes to the log has a facility of its own, and the Linux kernel has 0.
        let priority: u32 = prefix.split(',').next()?.parse().ok()?;
        let (at, message) = message.strip_prefix("NVRM: Xid (PCI:")?.split_once("): ")?;
        let (number, text) = message.split_once(',').unwrap_or((message, ""));
        let text = text.trim().chars().filter(|char| !char.is_control()).take(KEPT).collect();
        (priority < 8 && at == place).then(|| Some(Xid { number: number.trim().parse().ok()?, text }))?
    };
    log.lines().filter_map(xid).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_is_about_the_cause() {
        let check = |numbers: &[u32], expect: Option<(u32, &str)>| {
            let xids: Vec<_> = numbers.iter().map(|&number| Xid { number, text: String::new() }).collect();
            match (advise(&xids), expect) {
                (None, None) => {}
                (Some((xid, advice)), Some((number, part))) => {
                    assert!(xid.number == number && advice.contains(part), "{numbers:?}: {xid:?} {advice}");
                }
                (got, _) => panic!("{numbers:?}: {got:?}"),
            }
        };
        check(&[], None);
        check(&[79, 154], Some((79, "power plugs")));
        check(&[154, 79, 45], Some((79, "power plugs")));
        check(&[94, 154], Some((94, "memory has errors")));
        check(&[45, 154], Some((154, "the message names")));
        check(&[13], Some((13, "a program")));
        check(&[13, 9999], Some((13, "a program")));
        check(&[9999], Some((9999, "NVIDIA's list")));
    }

    #[test]
    fn the_errors_of_one_gpu_are_found() {
        let check = |log: &str, expect: &[(u32, &str)]| {
            let found = of(log, "0000:32:00.0".parse().expect("an address"));
            let found: Vec<_> = found.iter().map(|xid| (xid.number, xid.text.as_str())).collect();
            assert_eq!(found, expect, "{log:?}");
        };
        let off = "3,700,9,-;NVRM: Xid (PCI:0000:32:00): 79, pid='<unknown>', GPU has fallen off the bus.\n";
        check(off, &[(79, "pid='<unknown>', GPU has fallen off the bus.")]);
        check(
            &format!("6,1,2,-;usb 1-1: new\n SUBSYSTEM=usb\n{off}{off}"),
            &[(79, "pid='<unknown>', GPU has fallen off the bus."); 2],
        );
        check("3,1,2,-;NVRM: Xid (PCI:0000:32:00): 154\n", &[(154, "")]);
        check("3,1,2,-;NVRM: Xid (PCI:0000:33:00): 79, x\n", &[]);
        // What a process writes there is none, nor what makes no sense.
        check("12,1,2,-;NVRM: Xid (PCI:0000:32:00): 79, x\n", &[]);
        check("3,1,2,-;NVRM: Xid (PCI:0000:32:00): 99999999999, x\nNVRM: Xid (PCI:0000:32:00): 79\n", &[]);
    }
}
