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

/// What tells a program, as it is now, from what may be in its place later: its length, and when it was written.
pub fn identity(path: &Path) -> String {
    let file = std::fs::metadata(path);
    let file = file.map(|file| (file.len(), file.mtime(), file.mtime_nsec())).unwrap_or_default();
    format!("{}-{}.{}", file.0, file.1, file.2)
}

#[cfg(test)]
mod tests {
    use super::*;

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
