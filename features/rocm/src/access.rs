//! Why HIP finds no device: what its nodes say.

use std::fs::OpenOptions;
use std::io;

use crate::{Roots, devices};

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
    "look whether ROCR_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES hides it, whether this version of ROCm knows it, and what \
     `rocminfo` says"
        .into()
}
