//! Why HIP finds no device: what its nodes say.

use std::fs::OpenOptions;
use std::io;

use crate::{Roots, devices};

/// What to do about a device that is listed, may be opened, and is not HIP's.
pub(crate) const HIDDEN: &str = "look whether ROCR_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES hides it, whether this version of ROCm \
                                 knows it, and what `rocminfo` says";

/// What to do about it that HIP finds no device.
pub(crate) fn remedy(roots: &Roots) -> String {
    let kfd = roots.dev.join("kfd");
    let listed = match devices(roots) {
        Ok(listed) => listed,
        Err(error) => return error.to_string(),
    };
    if listed.is_empty() {
        return "the compute driver lists no GPU: bind one to amdgpu that ROCm knows".into();
    }
    let renders = listed.iter().filter_map(|device| device.render_node.clone());
    for node in std::iter::once(kfd).chain(renders) {
        // As HIP opens them.
        let Err(error) = OpenOptions::new().read(true).write(true).open(&node) else { continue };
        let node = node.display();
        return match error.kind() {
            io::ErrorKind::PermissionDenied => format!(
                "this user may not open {node}: join the groups that own it (`sudo usermod -aG render,video $USER`, and log in \
                 again), or run as root"
            ),
            io::ErrorKind::NotFound => {
                format!("there is no {node}: give it to this container, or load amdgpu (`modprobe amdgpu`)")
            }
            _ => format!("{node} can't be opened: {error}; look at `dmesg` for what amdgpu says"),
        };
    }
    HIDDEN.into()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_remedy_is_for_what_is_wrong() {
        let check = |files: &[&str], folders: &[&str], what: &str| {
            let root = tempfile::tempdir().unwrap();
            let roots = Roots { sys: root.path().join("sys"), dev: root.path().join("dev") };
            for folder in folders {
                fs::create_dir_all(root.path().join(folder)).unwrap();
            }
            for file in files {
                let path = root.path().join(file);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(
                    &path,
                    match path.file_name().unwrap().to_str().unwrap() {
                        "gpu_id" => "7",
                        "properties" => crate::topology::tests::MI300X,
                        _ => "",
                    },
                )
                .unwrap();
            }
            let told = remedy(&roots);
            assert!(told.contains(what), "{told}, not {what}");
        };
        let nodes = "sys/class/kfd/kfd/topology/nodes";
        let (id, properties) = (format!("{nodes}/1/gpu_id"), format!("{nodes}/1/properties"));
        let listed = [id.as_str(), properties.as_str()];
        let with = |more: &[&'static str]| [&listed, more].concat();
        check(&[], &[], "modprobe amdgpu");
        check(&[], &[nodes], "the compute driver lists no GPU");
        check(&listed, &[], "there is no");
        check(&with(&["dev/kfd"]), &[], "dev/dri/renderD128");
        check(&with(&["dev/dri/renderD128"]), &["dev/kfd"], "dev/kfd can't be opened");
        check(&with(&["dev/kfd", "dev/dri/renderD128"]), &[], "HIP_VISIBLE_DEVICES hides it");
    }
}
