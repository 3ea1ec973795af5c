//! Hashes the sources of the compiler, so that code in the cache is used only by the compiler that made it.

use std::hash::{DefaultHasher, Hasher as _};
use std::path::{Path, PathBuf};
use std::{env, fs};

/// Adds all files below a folder, in the order of their names.
fn add(path: &Path, hash: &mut DefaultHasher) {
    if path.is_dir() {
        let entries = fs::read_dir(path).expect("the folder can be read");
        let mut entries: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
        entries.sort();
        entries.iter().for_each(|entry| add(entry, hash));
    } else if let Ok(content) = fs::read(path) {
        hash.write(&content);
    }
}

fn main() {
    let own = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let mut hash = DefaultHasher::new();
    // The IR decides what is valid, and the lock file which versions of the code generators are built in.
    for part in ["src", "../vm-ir/src", "../Cargo.lock"] {
        let path = own.join(part);
        if path.exists() {
            println!("cargo::rerun-if-changed={}", path.display());
            add(&path, &mut hash);
        }
    }
    println!("cargo::rustc-env=VM_JIT_SOURCES={:016x}", hash.finish());
}
