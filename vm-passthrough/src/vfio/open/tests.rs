//! Tests of the choice of a back end, on a fake tree.

use std::io;
use std::os::unix::fs::symlink;
use std::time::Duration;

use super::*;
use crate::host::SysfsWriter;

#[derive(Debug)]
struct ReadOnly;

impl SysfsWriter for ReadOnly {
    fn write(&self, _path: &Path, _value: &str, _deadline: Duration) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }
}

const GPU: &str = "0000:65:00.0";
const AUDIO: &str = "0000:65:00.1";

/// A host with the functions that have these drivers and, where set, a node of their own.
fn host(nodes: &[&str], functions: &[(&str, Option<&str>, bool)]) -> (tempfile::TempDir, Host) {
    let root = tempfile::tempdir().unwrap();
    let host = Host::at(root.path(), Arc::new(ReadOnly));
    for node in nodes {
        let node = host.dev.join(node);
        std::fs::create_dir_all(node.parent().unwrap()).unwrap();
        std::fs::write(node, "").unwrap();
    }
    for (number, (address, driver, node)) in functions.iter().enumerate() {
        let directory = host.pci_device(address.parse().unwrap());
        std::fs::create_dir_all(&directory).unwrap();
        if let Some(driver) = driver {
            symlink(format!("../../../bus/pci/drivers/{driver}"), directory.join("driver")).unwrap();
        }
        symlink("../../../kernel/iommu_groups/12", directory.join("iommu_group")).unwrap();
        if *node {
            let name = format!("vfio{number}");
            std::fs::create_dir_all(directory.join("vfio-dev").join(&name)).unwrap();
            std::fs::write(directory.join("vfio-dev").join(&name).join("dev"), "511:0\n").unwrap();
            std::fs::create_dir_all(host.dev.join("vfio/devices")).unwrap();
            std::fs::write(host.dev.join("vfio/devices").join(&name), "").unwrap();
        }
    }
    (root, host)
}

#[test]
fn chooses_a_back_end() {
    fn check(
        nodes: &[&str],
        functions: &[(&str, Option<&str>, bool)],
        asked: &[&str],
        expect: Result<Backend, &str>,
    ) {
        let (_root, host) = host(nodes, functions);
        let asked: Vec<PciAddress> = asked.iter().map(|address| address.parse().unwrap()).collect();
        match (choose_backend(&host, &asked), expect) {
            (Ok(got), Ok(expect)) => assert_eq!(got, expect, "{nodes:?} {functions:?}"),
            (Err(error), Err(expect)) => assert!(error.to_string().contains(expect), "{error}"),
            (got, expect) => panic!("{got:?}, expected {expect:?}"),
        }
    }
    const BOTH: &[&str] = &["iommu", "vfio/vfio"];
    const OLD: &[&str] = &["vfio/vfio"];
    let vfio = Some("vfio-pci");
    check(BOTH, &[(GPU, vfio, true)], &[GPU], Ok(Backend::Iommufd));
    check(BOTH, &[(GPU, Some("nvgrace_gpu_vfio_pci"), true)], &[GPU], Ok(Backend::Iommufd));
    check(BOTH, &[(GPU, vfio, false)], &[GPU], Ok(Backend::Group));
    check(BOTH, &[(GPU, vfio, true), (AUDIO, vfio, true)], &[GPU, AUDIO], Ok(Backend::Iommufd));
    check(BOTH, &[(GPU, vfio, true), (AUDIO, vfio, false)], &[GPU, AUDIO], Ok(Backend::Group));
    check(OLD, &[(GPU, vfio, true)], &[GPU], Ok(Backend::Group));
    check(&["iommu"], &[], &[], Ok(Backend::Iommufd));
    check(BOTH, &[(GPU, vfio, true)], &[], Ok(Backend::Iommufd));
    check(BOTH, &[], &[], Ok(Backend::Group));
    check(&[], &[(GPU, vfio, false)], &[GPU], Err("vfio_iommu_type1"));
    check(BOTH, &[(GPU, Some("nvidia"), false)], &[GPU], Err("the driver nvidia has it"));
    check(BOTH, &[(GPU, None, false)], &[GPU], Err("no driver has it"));
    check(BOTH, &[], &[GPU], Err("no such function"));
}

#[test]
fn a_missing_node_is_an_error_that_says_what_to_do() {
    let (_root, host) = host(&[], &[(GPU, Some("vfio-pci"), false)]);
    for backend in [Backend::Group, Backend::Iommufd] {
        let error = open_space(&host, &[], Some(backend)).unwrap_err().to_string();
        assert!(error.contains("open on") && error.contains("load the module vfio-pci"), "{error}");
    }
    // A file that is no VFIO node answers no ioctl.
    std::fs::create_dir_all(host.dev.join("vfio")).unwrap();
    std::fs::write(host.dev.join("vfio/vfio"), "").unwrap();
    let error = open_space(&host, &[], Some(Backend::Group)).unwrap_err();
    assert!(matches!(error, VfioError::System { operation: "VFIO_GET_API_VERSION", .. }), "{error}");
}

#[test]
fn groups_are_numbers() {
    let (_root, host) = host(&[], &[(GPU, Some("vfio-pci"), false)]);
    let gpu: PciAddress = GPU.parse().unwrap();
    assert_eq!(iommu_group(&host, gpu).unwrap(), 12);
    let link = host.pci_device(gpu).join("iommu_group");
    std::fs::remove_file(&link).unwrap();
    assert!(iommu_group(&host, gpu).unwrap_err().to_string().contains("no IOMMU group"));
    symlink("../../not-a-number", &link).unwrap();
    assert!(iommu_group(&host, gpu).is_err());
}
