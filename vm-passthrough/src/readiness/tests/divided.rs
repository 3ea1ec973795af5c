//! Devices that are divided into vGPUs or MIG instances.

use super::*;

/// Devices that are divided. No such hardware was at hand: the trees are made by its vendor's documents.
#[test]
fn divided_devices() {
    const UUID: &str = "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001";
    let types = format!("sys/bus/pci/devices/{DISK}/mdev_supported_types");
    let scene = Scene::new().write(&format!("{types}/nvidia-63/name"), "GRID P4-1Q\n");
    assert_eq!(scene.explain().blockers, [], "it could be divided, and is not");
    scene
        .sim
        .link(&format!("sys/bus/pci/devices/{DISK}/{UUID}/mdev_type"), &format!("{types}/nvidia-63"))
        .unwrap();
    let remove = format!("bus/mdev/devices/{UUID}/remove");
    scene.check(Code::VgpusInUse, Blocks, &[UUID, "GRID P4-1Q"], &["echo 1 > ", &remove]);

    let information = format!("proc/driver/nvidia/gpus/{DISK}/information");
    let mut scene = Scene::new().write(&information, "Device Minor: \t 0\n");
    assert_eq!(scene.explain().blockers, []);
    for number in 0..6 {
        let path = format!("proc/driver/nvidia/capabilities/gpu0/mig/gi{number}/ci0/access");
        scene = scene.write(&path, "DeviceFileMinor: 3\n");
    }
    scene.check(Code::MigInUse, Blocks, &["gi0/ci0", "and 2 more"], &["nvidia-smi mig -i 0000:01:00.0 -dci"]);

    let dir = format!("sys/bus/pci/devices/{DISK}/nvidia");
    let scene = Scene::new()
        .write(&format!("{dir}/creatable_vgpu_types"), "ID    : vGPU Name\n1428 : NVIDIA H200X-141C\n")
        .write(&format!("{dir}/current_vgpu_type"), "0\n");
    scene.check(Code::VgpuFunction, Blocks, &["is 0", "NVIDIA H200X-141C"], &["whole GPU", "libvirt"]);
    let scene = scene.write(&format!("{dir}/current_vgpu_type"), "1428\n");
    scene.check(Code::VgpuFunction, Blocks, &["makes it NVIDIA H200X-141C"], &["whole GPU"]);
    let mut manager = crate::PassthroughManager::with_host(scene.sim.plain_host()).unwrap();
    let refused = manager.claim(address(DISK), &ClaimOptions::default()).unwrap_err().to_string();
    assert!(refused.contains("vgpu-function"), "{refused}");
}
