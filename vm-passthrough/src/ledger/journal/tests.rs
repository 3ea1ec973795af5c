//! What is read of a record, whole or damaged.

use proptest::prelude::*;

use super::*;

fn lines(bodies: &[&str]) -> String {
    bodies.iter().map(|body| line_of(body)).collect()
}

const OPENING: [&str; 4] = ["ledger 2", "boot b", "claim 0000:01:00.0 process", "owner 7 vm%20x"];

#[test]
fn crc_is_the_standard_one() {
    assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
}

type Expect<'a> = Result<(usize, bool, bool), &'a str>;

fn compare(text: &str, expect: Expect<'_>) {
    match (parse(text.as_bytes()), expect) {
        (Ok(entry), Ok(expect)) => {
            assert_eq!((entry.functions.len(), entry.claimed, entry.releasing), expect, "{text}");
        }
        (Err(Unread::Damaged(what)), Err(expect)) => assert!(what.contains(expect), "{text}: {what}"),
        (got, _) => panic!("{text}: {got:?}"),
    }
}

#[test]
fn reads_what_can_be_and_refuses_what_cannot() {
    fn check(more: &[&str], expect: Expect<'_>) {
        let text = lines(&[&OPENING[..], more].concat());
        compare(&ended(text), expect);
    }
    check(&[], Ok((0, false, false)));
    check(&["take 0000:01:00.0 nvme -"], Ok((1, false, false)));
    check(&["take 0000:01:00.0 - -", "keep 0000:01:00.1 vfio-pci", "claimed"], Ok((2, true, false)));
    check(&["take 0000:01:00.0 - -", "claimed", "release", "restored 0000:01:00.0"], Ok((1, true, true)));
    check(&["take 0000:01:00.0 nvme - flr%20bus"], Ok((1, false, false)));
    check(&["keep 0000:01:00.0 vfio-pci flr"], Ok((1, false, false)));
    check(&["take 0000:01:00.0 nvme - flr x_vfio_pci"], Ok((1, false, false)));
    check(&["take 0000:01:00.0 nvme - - x_vfio_pci"], Ok((1, false, false)));
    check(&["take 0000:01:00.0 nvme - flr nvme"], Err("not a record"));
    check(&["take 0000:01:00.0 nvme - flr ../x_vfio_pci"], Err("not a record"));
    check(&["take 0000:01:00.0 nvme - flr x_vfio_pci more"], Err("not a record"));
    check(&["take 0000:01:00.0 nvme - flr vfio-pci"], Err("the checksum of the whole"));
    check(&["take 0000:01:00.0 nvme - flr vfio-pci 0:1048576,4:17179869184"], Ok((1, false, false)));
    check(&["take 0000:01:00.0 nvme - - x_vfio_pci 5:4096"], Ok((1, false, false)));
    for sizes in ["6:4096", "0:3", "1:4096,0:4096", "0:4096,", "0", "0:4096 more", "0:99999999999999999999"] {
        check(&[&format!("take 0000:01:00.0 nvme - flr vfio-pci {sizes}")], Err("not a record"));
    }
    check(&["owner 7 x 1700000000 web1 more"], Err("not a record"));
    check(&["owner 7 x yesterday"], Err("not a record"));
    check(&["nonsense"], Err("line 5: `nonsense` is not a record"));
    check(&["take 0000:01:00.0 ../../x -"], Err("not a record"));
    check(&["take 0000:01:00.0 %2e%2e -"], Err("not a record"));
    check(&["take 0000:01:00.0 nvme - flr more"], Err("not a record"));
    check(&["take 0000:01:00.0 nvme - FLR"], Err("not a record"));
    check(&["take 0000:01:00.0 nvme - -"], Err("not a record"));
    check(&["keep 0000:01:00.0 vfio-pci %20"], Err("not a record"));
    check(&["take 0000:01:00.0 %zz -"], Err("not a record"));
    check(&["take 0000:01:00.0 nvme -", "take 0000:01:00.0 nvme -"], Err("cannot follow"));
    check(&["restored 0000:01:00.0"], Err("cannot follow"));
    check(&["claimed", "take 0000:01:00.0 nvme -"], Err("cannot follow"));
    check(&["claimed", "user 1 x"], Err("cannot follow"));
    // What is never written, though each line is sound.
    check(&["release", "release"], Err("the checksum of the whole"));

    compare("", Err("it is empty"));
    compare("nonsense\nmore\n", Err("line 1: the checksum is wrong"));
    compare(&lines(&["boot b", "boot b"]), Err("which version"));
    for version in ["ledger 0", "ledger 1"] {
        compare(&lines(&[version, "boot b"]), Err("no such version"));
    }
    compare(&lines(&OPENING), Err("the line that ends a record is missing"));
    let text = lines(&["ledger 2", "boot b", "boot b", "boot b"]);
    compare(&ended(text), Err("does not open with"));
    let text = lines(&OPENING[..3]);
    let whole = ended(text.clone());
    compare(&whole, Err("before it says whose"));
    let end = whole.strip_prefix(&text).unwrap();
    compare(&(lines(&OPENING) + end), Err("the checksum of the whole"));
    assert_eq!(parse(lines(&["ledger 3", "what it likes"]).as_bytes()), Err(Unread::Newer(3)));
}

#[test]
fn names_survive() {
    fn check(name: Option<&str>, text: &str) {
        assert_eq!(escape(name), text);
        assert_eq!(unescape(text).unwrap().as_deref(), name);
    }
    check(None, "-");
    check(Some("-"), "%2d");
    check(Some(""), "");
    check(Some("vfio-pci"), "vfio-pci");
    check(Some("a b%\n"), "a%20b%25%0a");
    check(Some("ü"), "%c3%bc");
}

fn function(number: u8, driver: Option<&str>, kept: bool) -> ClaimedFunction {
    ClaimedFunction {
        address: PciAddress::new(0, 1, 0, number).unwrap(),
        driver: driver.map(str::to_owned),
        driver_override: (!kept).then(|| "x".into()),
        resets: (number > 0).then(|| "flr bus".into()),
        bar_sizes: if number == 0 && !kept { vec![(1, 256 << 20), (4, 1 << 40)] } else { Vec::new() },
        vfio_driver: match kept {
            true => driver.unwrap_or_default().to_owned(),
            false => if number > 1 { "x_vfio_pci" } else { VFIO_DRIVER }.to_owned(),
        },
        kept,
        restored: false,
    }
}

/// A claim at every step of its life.
fn lives(persistent: bool, command: &str) -> Vec<Entry> {
    let guest = persistent.then(|| command.into());
    let owner = Owner { pid: 1, command: command.into(), since: Some(5), guest };
    let target = PciAddress::new(0, 1, 0, 0).unwrap();
    let mut entry = Entry::new(target, persistent, owner.clone(), "b".into());
    let mut lives = vec![entry.clone()];
    let taken =
        [function(2, None, false), function(1, Some("vfio-pci"), true), function(0, Some("nvme"), false)];
    let mut records: Vec<_> = taken.into_iter().map(Record::Function).collect();
    records.push(Record::Claimed);
    records.extend(persistent.then_some(Record::User(owner)));
    records.push(Record::Release);
    records.extend((0..3).map(|number| Record::Restored(function(number, None, false).address)));
    for record in records {
        assert!(entry.apply(&record), "{record:?}");
        lives.push(entry.clone());
    }
    lives
}

/// What is read is what was written, or nothing: no prefix, no changed byte and no zeroed tail of any record tells
/// of another claim. A function that a damaged record still names is named as it was.
#[test]
fn a_damaged_record_is_never_taken_for_another() {
    let is_refused = |entry: &Entry, bytes: &[u8]| {
        match parse(bytes) {
            Err(Unread::Damaged(what)) => assert!(!what.is_empty()),
            // A larger number of the version is one that is not known.
            Err(Unread::Newer(version)) => panic!("version {version} of {entry:?}"),
            Ok(got) => panic!("{got:?} of {entry:?}"),
        }
        for function in salvage(bytes) {
            let before = entry.function(function.address).unwrap();
            assert_eq!(function, ClaimedFunction { restored: false, ..before.clone() });
        }
    };
    for entry in [lives(true, "x"), lives(false, "a b")].concat() {
        let text = entry.text().into_bytes();
        assert_eq!(parse(&text), Ok(entry.clone()));
        for cut in 0..text.len() {
            is_refused(&entry, &text[..cut]);
            let mut zeroed = text.clone();
            zeroed[cut..].fill(0);
            is_refused(&entry, &zeroed);
        }
        for at in 0..text.len() {
            // Each bit, and a few values that mean something to the format.
            let others =
                (0..8).map(|bit| text[at] ^ 1 << bit).chain([0, b' ', b'\n', b'%', b'-', b'0', 0xff]);
            for other in others.filter(|&other| other != text[at]) {
                let mut changed = text.clone();
                changed[at] = other;
                is_refused(&entry, &changed);
            }
        }
    }
}

proptest! {
    #[test]
    fn any_bytes_are_read_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..256)) {
        let _ = parse(&bytes);
        let _ = salvage(&bytes);
    }

    /// Lines that are dropped, doubled, exchanged or of another claim: what is read is never anything else than a
    /// claim that was written.
    #[test]
    fn lines_of_records_do_not_mix(
        picks in prop::collection::vec((0usize..22, 0usize..16), 1..14),
        command in ".{0,16}",
    ) {
        let lives = [lives(true, &command), lives(false, &command)].concat();
        let texts: Vec<_> = lives.iter().map(Entry::text).collect();
        let mixed: String = picks
            .into_iter()
            .filter_map(|(text, line)| texts[text % texts.len()].split_inclusive('\n').nth(line))
            .collect();
        if let Ok(entry) = parse(mixed.as_bytes()) {
            prop_assert!(lives.contains(&entry));
        }
    }
}
