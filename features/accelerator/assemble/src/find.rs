//! Where programs are.

use std::env;
use std::ffi::OsStr;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::{Job, Limits, Memory, Program, Scratch, failed};

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

/// The shared libraries that the loader has for a program, as it tells where it is asked to (`ld.so(8)`): the program itself does not run.
/// Nothing of one that has none, or whose loader is another; of a script, those of what runs it.
pub fn libraries(program: &Path) -> Vec<PathBuf> {
    const LIMITS: Limits = Limits { time: Duration::from_secs(5), memory: 1 << 30, output: 1 << 20 };
    let traced = Program {
        path: program,
        arguments: Vec::new(),
        environment: vec![("LD_TRACE_LOADED_OBJECTS".into(), "1".into())],
        memory: Memory::Space,
        prints: true,
        limits: LIMITS,
    };
    let told = Scratch::new("libraries").map_err(failed(program, "making its output"));
    let told = told.and_then(|output| Job::start(traced, output, &[])?.end(LIMITS.deadline()));
    let told = told.and_then(|told| told.read(LIMITS.output).map_err(failed(program, "reading its output")));
    let told = told.inspect_err(|error| tracing::debug!(%error, "the program's libraries are not known"));
    let told = String::from_utf8_lossy(&told.unwrap_or_default()).into_owned();
    // `libz.so.1 => /lib/libz.so.1 (0x…)`, or a path alone.
    let path = |line: &str| {
        let (path, _) = line.rsplit_once(" (0x")?;
        let path = path.rsplit_once("=> ").map_or(path, |(_, path)| path).trim();
        path.starts_with('/').then(|| PathBuf::from(path))
    };
    told.lines().filter_map(path).collect()
}

/// What tells a program, as it is now, from others and from what may be in its place later: where it is, its inode and length, and
/// when it was written and changed. Of [libraries] that it loads it says nothing.
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
    fn libraries_are_those_that_the_loader_has() {
        let own = libraries(&env::current_exe().unwrap());
        assert!(own.iter().any(|path| path.to_string_lossy().contains("libc.so")), "{own:?}");
        assert!(own.iter().all(|path| path.is_absolute() && path.exists()), "{own:?}");
        assert_eq!(libraries(Path::new("/nowhere/llc")), Vec::<PathBuf>::new());
        let root = tempfile::tempdir().unwrap();
        let text = root.path().join("text");
        std::fs::write(&text, "no program").unwrap();
        assert_eq!(libraries(&text), Vec::<PathBuf>::new());
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
