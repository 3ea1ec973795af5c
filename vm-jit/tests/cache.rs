//! The cache: hits, damage, bounds, many writers.

use std::fs;
use std::path::{Path, PathBuf};
use vm_ir::{Trust, ValidModule, text, validate};
use vm_jit::cache::{Cache, CacheOptions, Key};
use vm_jit::{Target, compile};

fn module(trust: Trust, number: u32) -> ValidModule {
    let text = format!(
        "vir 1\nkernel @k(@x: view<i32, [?], write>) at 0x1000 block(32) {{\n  %i = global_id.x : i64\n  \
         %a = const {number} : i32\n  store @x[%i], %a\n}}\n"
    );
    validate(text::parse(&text).unwrap(), trust).unwrap()
}

fn target(text: &str) -> Target {
    text.parse().unwrap()
}

fn open(folder: &Path, disk_bytes: u64) -> Cache {
    let options = CacheOptions { folder: Some(folder.to_owned()), disk_bytes, ..CacheOptions::default() };
    Cache::open(&options).unwrap()
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(folder).unwrap().map(|e| e.unwrap().path());
    files.filter(|p| p.extension().is_some_and(|e| e == "entry")).collect()
}

#[test]
fn finds_in_memory_and_on_disk() {
    let folder = tempfile::tempdir().unwrap();
    let (module, target) = (module(Trust::Guest, 1), target("ptx:sm_90a"));
    let cache = open(folder.path(), 1 << 20);
    let first = cache.compile(&module, &target).unwrap();
    assert_eq!(first, compile(&module, &target).unwrap());
    assert_eq!(cache.compile(&module, &target).unwrap(), first);
    assert_eq!((cache.statistics().misses, cache.statistics().memory_hits), (1, 1));
    let again = open(folder.path(), 1 << 20);
    assert_eq!(again.compile(&module, &target).unwrap(), first);
    assert_eq!((again.statistics().disk_hits, again.statistics().misses), (1, 0));
}

/// Wherever it happens, on every target; the kernel behind it is not blamed, and what is kept is nothing.
#[test]
fn a_panic_is_the_kernels_error() {
    for target in ["ptx:sm_90a", "cpu:x86-64-v3", "cpu:aarch64"].map(target) {
        for phase in ["judge", "legalise", "write"] {
            let folder = tempfile::tempdir().unwrap();
            let cache = open(folder.path(), 1 << 20);
            let name = format!("panics_in_{phase}");
            let kernels = [("before", 1), (&*name, 2), ("behind", 3)]
                .map(|(name, at)| format!("kernel @{name}() at 0x{at}000 block(32) {{\n}}\n"));
            let text = format!("vir 1\n{}", kernels.concat());
            let module = validate(text::parse(&text).unwrap(), Trust::Guest).unwrap();
            for misses in 1..=2 {
                let reject = cache.compile(&module, &target).unwrap_err().0.remove(0);
                assert_eq!((&*reject.kernel, reject.guest.0), (&*name, 0x2000), "{reject}");
                assert_eq!(reject.kind.code(), "generator");
                assert!(reject.to_string().contains(&format!("it panicked: planted to {phase}")), "{reject}");
                assert_eq!(cache.statistics().misses, misses);
                assert!(entries(folder.path()).is_empty());
            }
        }
    }
}

/// What the code generator's verifier refuses, whether it was written so or became so; what outgrows the bounds on its way; and
/// a panic of its own.
#[test]
fn what_the_generator_gets_wrong_is_the_kernels_error() {
    for target in ["cpu:x86-64-v3", "cpu:aarch64"].map(target) {
        for (name, code, says) in [
            ("ill_typed_when_written", "generator", "arg 1 (v"),
            ("ill_typed_when_optimised", "generator", "arg 1 (v"),
            ("ill_typed_when_scheduled", "generator", "arg 1 (v"),
            ("outgrows_when_written", "too-large", "instructions or more, 524288 are allowed"),
            ("outgrows_when_scheduled", "too-large", "instructions or more, 524288 are allowed"),
            ("panics_when_written", "generator", "it panicked: "),
            ("panics_when_optimised", "generator", "it panicked: "),
            ("panics_when_scheduled", "generator", "it panicked: "),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let cache = open(folder.path(), 1 << 20);
            let text =
                text::print(&module(Trust::Guest, 1).into_module()).replace("@k(", &format!("@{name}("));
            let module = validate(text::parse(&text).unwrap(), Trust::Guest).unwrap();
            for misses in 1..=2 {
                let reject = cache.compile(&module, &target).expect_err(name).0.remove(0);
                assert_eq!((&*reject.kernel, reject.kind.code()), (name, code), "{reject}");
                assert!(reject.to_string().contains(says), "{reject}");
                assert_eq!(cache.statistics().misses, misses);
                assert!(entries(folder.path()).is_empty());
            }
        }
    }
}

#[test]
fn every_part_of_the_key_counts() {
    let mut keys = std::collections::HashSet::new();
    let mut lines = target("ptx:sm_80");
    let Target::Ptx(options) = &mut lines else { panic!("{lines}") };
    options.source = Some("a.vir".to_owned());
    let mut old = target("ptx:sm_80");
    let Target::Ptx(options) = &mut old else { panic!("{old}") };
    options.max_version = Some(vm_jit::backend::ptx::Version::new(7, 1));
    for target in [target("ptx:sm_80"), target("ptx:sm_86"), lines, old] {
        for module in [module(Trust::Guest, 1), module(Trust::Guest, 2), module(Trust::Trusted, 1)] {
            for product in ["artifact", "cubin"] {
                assert!(keys.insert(Key::new(&module, &target, product)));
            }
        }
    }
}

#[test]
fn what_is_kept_beside_code_has_keys_of_its_own() {
    let mut keys = std::collections::HashSet::new();
    let parts: [(&str, &[&[u8]]); 6] = [
        ("choice", &[]),
        ("choice", &[b""]),
        ("choice", &[b"ab", b"c"]),
        ("choice", &[b"a", b"bc"]),
        ("choice", &[b"abc"]),
        ("other", &[b"abc"]),
    ];
    for (what, parts) in parts {
        assert!(keys.insert(Key::of(what, parts)), "{what} {parts:?}");
        assert_eq!(Key::of(what, parts), Key::of(what, parts));
    }
}

#[test]
fn an_entry_larger_than_the_bound_is_not_read() {
    let folder = tempfile::tempdir().unwrap();
    let key = Key::of("choice", &[b"large"]);
    open(folder.path(), 1 << 20).put(&key, vec![7; 8192]);
    assert_eq!(open(folder.path(), 1 << 20).get(&key).unwrap().len(), 8192);
    let small = open(folder.path(), 4096);
    assert!(small.get(&key).is_none());
    assert_eq!(small.statistics().discarded, 1);
}

#[test]
fn damaged_entries_are_discarded() {
    let (module, target) = (module(Trust::Guest, 1), target("ptx:sm_90a"));
    let damage: [fn(&mut Vec<u8>); 6] = [
        |bytes| bytes.clear(),
        |bytes| bytes.truncate(bytes.len() / 2),
        |bytes| bytes.push(0),
        |bytes| bytes[0] ^= 1,
        |bytes| bytes[20] ^= 1,
        |bytes| *bytes.last_mut().unwrap() ^= 1,
    ];
    for damage in damage {
        let folder = tempfile::tempdir().unwrap();
        let good = open(folder.path(), 1 << 20).compile(&module, &target).unwrap();
        let path = entries(folder.path()).remove(0);
        let mut bytes = fs::read(&path).unwrap();
        damage(&mut bytes);
        fs::write(&path, bytes).unwrap();
        let cache = open(folder.path(), 1 << 20);
        assert_eq!(cache.compile(&module, &target).unwrap(), good);
        assert_eq!(cache.statistics().discarded, 1);
        // It was written again.
        assert_eq!(
            open(folder.path(), 1 << 20).get(&Key::new(&module, &target, "artifact")).unwrap()[..],
            good.to_bytes()
        );
    }
}

#[test]
fn a_link_is_not_followed() {
    let folder = tempfile::tempdir().unwrap();
    let key = Key::new(&module(Trust::Guest, 1), &target("ptx:sm_90a"), "artifact");
    let path = folder.path().join(format!("{key}.entry"));
    std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
    assert_eq!(open(folder.path(), 1 << 20).get(&key), None);
    assert!(!path.exists());
}

/// What is found is run, and whoever can write a file can make its checksum too.
#[test]
fn what_another_user_could_have_written_is_not_used() {
    use std::os::unix::fs::{PermissionsExt as _, chown};
    let check = |spoil: &dyn Fn(&Path)| {
        let folder = tempfile::tempdir().unwrap();
        let key = Key::new(&module(Trust::Guest, 1), &target("ptx:sm_90a"), "artifact");
        open(folder.path(), 1 << 20).put(&key, vec![7; 100]);
        spoil(&entries(folder.path())[0]);
        let cache = open(folder.path(), 1 << 20);
        assert_eq!(cache.get(&key), None);
        // Another one takes its place.
        cache.put(&key, vec![8; 100]);
        assert_eq!(open(folder.path(), 1 << 20).get(&key).unwrap()[..], [8; 100]);
    };
    for mode in [0o620, 0o602, 0o666] {
        check(&|path| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap());
    }
    if rustix::process::geteuid().is_root() {
        check(&|path| chown(path, Some(12345), None).unwrap());
    } else {
        println!("skipped: only root can give a file to another user");
    }
}

#[test]
fn size_is_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let bound = 64 << 10;
    let cache = open(folder.path(), bound);
    let keys: Vec<Key> =
        (0..100).map(|n| Key::new(&module(Trust::Guest, n), &target("ptx:sm_90a"), "artifact")).collect();
    for key in &keys {
        cache.put(key, vec![7; 4000]);
        let total: u64 = entries(folder.path()).iter().map(|p| p.metadata().unwrap().len()).sum();
        assert!(total <= bound, "{total}");
    }
    assert!(entries(folder.path()).len() > 8);
    let last = open(folder.path(), bound).get(keys.last().unwrap());
    assert_eq!(last.unwrap()[..], [7; 4000]);
    // What is larger than the whole cache is not kept.
    cache.put(&keys[0], vec![7; 100_000]);
    assert!(!folder.path().join(format!("{}.entry", keys[0])).metadata().is_ok_and(|m| m.len() > bound));
}

#[test]
fn many_writers_and_readers() {
    let folder = tempfile::tempdir().unwrap();
    let keys: Vec<Key> =
        (0..20).map(|n| Key::new(&module(Trust::Guest, n), &target("ptx:sm_90a"), "artifact")).collect();
    std::thread::scope(|scope| {
        for worker in 0..6u8 {
            let (folder, keys) = (folder.path(), &keys);
            scope.spawn(move || {
                // Each its own cache, as another process would have.
                let cache = open(folder, 24 << 10);
                for round in 0..60usize {
                    let at = (round * 7 + usize::from(worker)) % keys.len();
                    if let Some(found) = open(folder, 24 << 10).get(&keys[at]) {
                        assert_eq!(found[..], vec![at as u8; 2000]);
                    }
                    cache.put(&keys[at], vec![at as u8; 2000]);
                    assert_eq!(cache.statistics().discarded, 0);
                }
            });
        }
    });
}

#[test]
fn a_folder_that_cannot_be_made_is_an_error() {
    let options = CacheOptions { folder: Some("/proc/none/cache".into()), ..CacheOptions::default() };
    assert!(Cache::open(&options).is_err());
}

#[test]
fn any_bytes_are_an_artifact_or_none() {
    let bytes = compile(&module(Trust::Guest, 1), &target("ptx:sm_90a")).unwrap().to_bytes();
    for cut in 0..bytes.len() {
        assert_eq!(vm_jit::Artifact::from_bytes(&bytes[..cut]), None);
    }
    for at in 0..bytes.len() {
        let mut changed = bytes.clone();
        changed[at] ^= 0xff;
        let _ = vm_jit::Artifact::from_bytes(&changed);
    }
}
