//! Where `ptxas` is.

use std::env;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use vm_assemble::find::{folders, is_program, versions};

use super::AssembleError;

/// The environment's variable that names `ptxas`.
pub const VARIABLE: &str = "VM_CUDA_PTXAS";

/// Where CUDA's packages put programs, beside `/usr/local/cuda-VERSION/bin`.
const USUAL: [&str; 4] =
    ["/usr/local/cuda/bin", "/opt/cuda/bin", "/usr/lib/cuda/bin", "/usr/lib/nvidia-cuda-toolkit/bin"];

pub(super) fn ptxas() -> Result<PathBuf, AssembleError> {
    if let Some(named) = env::var_os(VARIABLE) {
        let named = PathBuf::from(named);
        return if is_program(&named) { Ok(named) } else { Err(missing(vec![named])) };
    }
    let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(env::var_os);
    let homes: Vec<PathBuf> = homes.map(|home| PathBuf::from(home).join("bin")).collect();
    search(&homes, env::var_os("PATH").as_deref(), Path::new("/"))
}

/// Looks in `homes`, then in `path`, then in the usual places under `root`.
fn search(homes: &[PathBuf], path: Option<&OsStr>, root: &Path) -> Result<PathBuf, AssembleError> {
    let under = |place: &str| root.join(place.trim_start_matches('/'));
    let mut all = homes.to_vec();
    all.extend(folders(path));
    all.extend(USUAL.map(under));
    all.extend(versions(&under("/usr/local"), "cuda-").into_iter().map(|folder| folder.join("bin")));
    all.dedup();
    let found = all.iter().map(|folder| folder.join("ptxas")).find(|file| is_program(file));
    found.ok_or_else(|| missing(all))
}

fn missing(looked: Vec<PathBuf>) -> AssembleError {
    let remedy = format!(
        "install CUDA's compiler (Debian: nvidia-cuda-toolkit, NVIDIA's packages: cuda-nvcc-VERSION, PyPI: nvidia-cuda-nvcc) \
         or name the file in {VARIABLE}"
    );
    AssembleError::Missing { program: "ptxas", looked, remedy }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn it_is_found_where_it_may_be() {
        let root = tempfile::tempdir().unwrap();
        let at = |folder: &str| root.path().join(folder);
        let put = |folder: &str, mode: u32| {
            std::fs::create_dir_all(at(folder)).unwrap();
            let file = at(folder).join("ptxas");
            std::fs::write(&file, "").unwrap();
            std::fs::set_permissions(&file, PermissionsExt::from_mode(mode)).unwrap();
        };
        let path = env::join_paths([at("on-path"), PathBuf::new(), PathBuf::from("relative")]).unwrap();
        let check = |want: Option<&str>| {
            let found = search(&[at("home/bin")], Some(&path), root.path());
            assert_eq!(
                found.as_ref().ok(),
                want.map(|folder| at(folder).join("ptxas")).as_ref(),
                "{found:?}"
            );
            if let Err(error) = found {
                let text = error.to_string();
                assert!(text.contains("on-path") && text.contains("cuda-nvcc"), "{text}");
            }
        };
        check(None);
        put("usr/local/cuda-9.2/bin", 0o755);
        check(Some("usr/local/cuda-9.2/bin"));
        put("usr/local/cuda-12.9/bin", 0o755);
        put("usr/local/cuda-12.10/bin", 0o755);
        put("usr/local/cuda-old/bin", 0o755);
        check(Some("usr/local/cuda-12.10/bin"));
        put("usr/lib/nvidia-cuda-toolkit/bin", 0o755);
        check(Some("usr/lib/nvidia-cuda-toolkit/bin"));
        put("on-path", 0o644);
        check(Some("usr/lib/nvidia-cuda-toolkit/bin"));
        put("on-path", 0o755);
        check(Some("on-path"));
        put("home/bin", 0o755);
        check(Some("home/bin"));
    }
}
