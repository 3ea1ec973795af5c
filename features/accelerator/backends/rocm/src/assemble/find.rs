//! Where LLVM is.

use std::env;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use vm_assemble::find::{folders, is_program, versions};

use super::AssembleError;

/// The environment's variable that names the folder of `llc` and `ld.lld`.
pub const VARIABLE: &str = "VM_ROCM_LLVM";

/// `llc` and the linker, as packages of the release that tests use call them, and as LLVM itself does.
const RELEASE: [&str; 2] = ["llc-22", "ld.lld-22"];
const PLAIN: [&str; 2] = ["llc", "ld.lld"];

/// Where Debian's packages of that release put them under their own names.
const DEBIAN: &str = "usr/lib/llvm-22/bin";

pub(super) fn llvm() -> Result<[PathBuf; 2], AssembleError> {
    if let Some(named) = env::var_os(VARIABLE).filter(|named| !named.is_empty()) {
        let named = PathBuf::from(named);
        let found = [PLAIN, RELEASE].into_iter().find_map(|names| both(&named, names));
        return found.ok_or_else(|| missing(vec![named]));
    }
    let rocm = env::var_os("ROCM_PATH").map(PathBuf::from);
    search(rocm, env::var_os("PATH").as_deref(), Path::new("/"))
}

/// Looks in `path`, in the usual places under `root`, in the installation of `rocm`, and in `path` for any release.
fn search(rocm: Option<PathBuf>, path: Option<&OsStr>, root: &Path) -> Result<[PathBuf; 2], AssembleError> {
    let opt = root.join("opt");
    let rocm = rocm.into_iter().chain([opt.join("rocm")]).chain(versions(&opt, "rocm-"));
    let mut places: Vec<(PathBuf, [&str; 2])> = folders(path).map(|folder| (folder, RELEASE)).collect();
    places.push((root.join(DEBIAN), PLAIN));
    places.extend(rocm.map(|folder| (folder.join("llvm/bin"), PLAIN)));
    places.extend(folders(path).map(|folder| (folder, PLAIN)));
    match places.iter().find_map(|(folder, names)| both(folder, *names)) {
        Some(found) => Ok(found),
        None => {
            let mut looked: Vec<PathBuf> = Vec::new();
            for (folder, _) in places {
                if !looked.contains(&folder) {
                    looked.push(folder);
                }
            }
            Err(missing(looked))
        }
    }
}

/// Both programs, where the folder has them.
fn both(folder: &Path, names: [&str; 2]) -> Option<[PathBuf; 2]> {
    let files = names.map(|name| folder.join(name));
    files.iter().all(|file| is_program(file)).then_some(files)
}

fn missing(looked: Vec<PathBuf>) -> AssembleError {
    let remedy = format!(
        "install LLVM's assembler and linker (Debian: llvm-22 and lld-22, ROCm: rocm-llvm) or name the folder that has llc \
         and ld.lld in {VARIABLE}"
    );
    AssembleError::Missing { program: "llc with ld.lld", looked, remedy }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn they_are_found_where_they_may_be() {
        let root = tempfile::tempdir().unwrap();
        let at = |folder: &str| root.path().join(folder);
        let put = |folder: &str, names: &[&str]| {
            std::fs::create_dir_all(at(folder)).unwrap();
            for name in names {
                let file = at(folder).join(name);
                std::fs::write(&file, "").unwrap();
                std::fs::set_permissions(&file, PermissionsExt::from_mode(0o755)).unwrap();
            }
        };
        let path = env::join_paths([at("on-path"), PathBuf::new(), PathBuf::from("relative")]).unwrap();
        let check = |want: Option<(&str, [&str; 2])>| {
            let found = search(Some(at("rocm")), Some(&path), root.path());
            let want = want.map(|(folder, names)| names.map(|name| at(folder).join(name)));
            assert_eq!(found.as_ref().ok(), want.as_ref(), "{found:?}");
            if let Err(error) = found {
                let text = error.to_string();
                let says = ["on-path", "opt/rocm/llvm/bin", "lld-22", "rocm-llvm", VARIABLE];
                assert!(says.iter().all(|what| text.contains(what)), "{text}");
                assert_eq!(text.matches("on-path").count(), 1, "{text}");
            }
        };
        check(None);
        put("on-path", &["llc"]);
        check(None);
        put("on-path", &["ld.lld"]);
        check(Some(("on-path", PLAIN)));
        put("opt/rocm-6.4/llvm/bin", &PLAIN);
        put("opt/rocm-7.0/llvm/bin", &PLAIN);
        check(Some(("opt/rocm-7.0/llvm/bin", PLAIN)));
        put("opt/rocm/llvm/bin", &PLAIN);
        check(Some(("opt/rocm/llvm/bin", PLAIN)));
        put("rocm/llvm/bin", &PLAIN);
        check(Some(("rocm/llvm/bin", PLAIN)));
        put(DEBIAN, &PLAIN);
        check(Some((DEBIAN, PLAIN)));
        put("on-path", &RELEASE);
        check(Some(("on-path", RELEASE)));
    }
}
