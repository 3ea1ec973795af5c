//! Helper processes that outlive who asked for their write.

use std::process::{Child, Stdio};
use std::time::Instant;

use super::*;

const CHILD: &str = "VM_PASSTHROUGH_TEST_ORPHAN";
const TIMEOUT: Duration = Duration::from_secs(60);

/// The host below `root`, written to as a real one is, by helper processes.
fn real(root: &Path) -> Host {
    let like = SimDrivers::at(root).host();
    let mut host = Host::system();
    (host.sys, host.dev, host.proc) = (like.sys, like.dev, like.proc);
    (host.modules, host.state) = (like.modules, like.state);
    host
}

/// A child of `parent` that has slept for a while: the helper, and what it waits for.
fn sleeping_child(parent: u32) -> Option<u32> {
    let child = || {
        fs::read_dir("/proc").unwrap().flatten().find_map(|process| {
            let stat = fs::read_to_string(process.path().join("stat")).ok()?;
            let (pid, rest) = stat.split_once(" (vm-passthrough) S ")?;
            (rest.split(' ').next()? == parent.to_string()).then(|| pid.parse().ok())?
        })
    };
    let found = child()?;
    std::thread::sleep(Duration::from_millis(200));
    (child() == Some(found)).then_some(found)
}

fn killed(mut child: Child) -> u32 {
    child.kill().unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(9));
    child.id()
}

/// The owner dies while its helper waits in `unbind`, before Linux has taken the driver away. The function looks as if
/// nothing had been done to it, and still must not be declared restored: the helper goes on.
#[test]
fn an_orphan_is_waited_for() {
    if let Ok(root) = std::env::var(CHILD) {
        let options = within(TIMEOUT * 2);
        manager(real(Path::new(&root))).claim(nvme(), &options).unwrap();
        unreachable!("nobody lets it go on before it is killed");
    }
    let sim = new_sim();
    let before = bindings(&sim);
    let drivers = SimDrivers::new(&sim);
    // Opening a FIFO that nobody reads blocks, as a write to `unbind` does while somebody has the function's lock.
    let unbind = sim.path("sys/bus/pci/drivers/nvme/unbind");
    let _ = fs::remove_file(&unbind);
    rustix::fs::mknodat(rustix::fs::CWD, &unbind, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let owner = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "claim::tests::orphans::an_orphan_is_waited_for", "--test-threads=1", "--quiet"])
        .env(CHILD, sim.root())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let until = Instant::now() + TIMEOUT;
    let helper = loop {
        let begun = bindings(&sim)[&nvme()].1 == "vfio-pci\n";
        if let Some(helper) = begun.then(|| sleeping_child(owner.id())).flatten() {
            break helper;
        }
        assert!(Instant::now() < until, "the helper did not come to `unbind`");
        std::thread::sleep(Duration::from_millis(10));
    };
    let owner = killed(owner);
    assert!(Path::new(&format!("/proc/{helper}")).exists());
    assert_eq!(sim.driver_of(nvme()).as_deref(), Some("nvme"), "it has not unbound it yet");

    // The next command gets an error, and the ledger remembers.
    let wait = format!("waiting for process {owner} (");
    let wait = wait.as_str();
    let recovery = recover(&drivers.host(), SHORT).unwrap();
    assert!(recovery.recovered.is_empty(), "{recovery:?}");
    assert!(recovery.failed[0].to_string().contains(wait), "{:?}", recovery.failed);
    fails(manager(drivers.host()).claim(nvme(), &within(SHORT)), &[wait]);
    fails(release_within(&mut manager(drivers.host()), nvme(), SHORT), &[wait]);
    assert_eq!(ledger_files(&sim), ["0000:02:00.0.claim"]);

    // Or waits long enough. What the orphan did meanwhile is undone too.
    let host = drivers.host();
    let next = std::thread::spawn(move || recover(&host, TIMEOUT).unwrap());
    std::thread::sleep(Duration::from_millis(100));
    let address = nvme().to_string();
    drivers.host().writer().write(&unbind, &address, TIMEOUT).unwrap();
    assert_eq!(sim.driver_of(nvme()), None);
    assert!(!next.is_finished());
    assert_eq!(fs::read_to_string(&unbind).unwrap(), address);
    let recovery = next.join().unwrap();
    assert!(recovery.failed.is_empty() && recovery.recovered.len() == 1, "{recovery:?}");
    assert_eq!(bindings(&sim), before);
    assert!(ledger_files(&sim).is_empty());
}
