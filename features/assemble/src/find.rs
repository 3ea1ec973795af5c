//! Where programs are.

use std::env;
use std::ffi::OsStr;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

/// Whether it is a file that may be run.
pub fn is_program(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

/// The folders of a `PATH`. An empty entry of one is the current folder, which anyone may have filled; it is left out, as
/// all are that are relative.
pub fn folders(path: Option<&OsStr>) -> impl Iterator<Item = PathBuf> + '_ {
    path.map(env::split_paths).into_iter().flatten().filter(|folder| folder.is_absolute())
}

/// The folders of a folder whose names are `prefix` and a version, as `cuda-12.9` is, the newest first.
pub fn versions(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<(Vec<u32>, PathBuf)> = entries
        .filter_map(|entry| {
            let name = entry.file_name();
            let version = name.to_str()?.strip_prefix(prefix)?;
            let version = version.split('.').map(|part| part.parse().ok()).collect::<Option<Vec<u32>>>()?;
            Some((version, entry.path()))
        })
        .collect();
    found.sort();
    found.into_iter().rev().map(|(_, folder)| folder).collect()
}

/// What tells a program, as it is now, from others and from what may be in its place later: where it is, its inode and length, and
/// when it was written and changed. Of libraries that it loads it says nothing.
pub fn identity(path: &Path) -> String {
    let Ok(file) = std::fs::metadata(path) else { return String::new() };
    let place = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let times =
        [file.mtime(), file.mtime_nsec(), file.ctime(), file.ctime_nsec()].map(|time| time.to_string());
    format!("{} {}:{} {} {}", place.display(), file.dev(), file.ino(), file.len(), times.join("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_that_differ_have_other_identities() {
        let root = tempfile::tempdir().unwrap();
        let [a, b] = ["a", "b"].map(|name| root.path().join(name));
        std::fs::write(&a, "1").unwrap();
        std::fs::hard_link(&a, &b).unwrap();
        let first = identity(&a);
        assert_eq!(identity(&a), first);
        assert_ne!(identity(&b), first);
        let modified = std::fs::metadata(&a).unwrap().modified().unwrap();
        std::fs::write(&a, "2").unwrap();
        std::fs::File::options().write(true).open(&a).unwrap().set_modified(modified).unwrap();
        assert_ne!(identity(&a), first);
    }

    #[test]
    fn the_newest_is_first_and_what_is_no_version_is_left_out() {
        let root = tempfile::tempdir().unwrap();
        for name in ["llvm-9", "llvm-22", "llvm-22.1", "llvm-old", "clang-23", "llvm-"] {
            std::fs::create_dir(root.path().join(name)).unwrap();
        }
        let found = versions(root.path(), "llvm-");
        assert_eq!(found, ["llvm-22.1", "llvm-22", "llvm-9"].map(|name| root.path().join(name)));
        assert_eq!(versions(&root.path().join("nowhere"), "llvm-"), Vec::<PathBuf>::new());
    }
}
