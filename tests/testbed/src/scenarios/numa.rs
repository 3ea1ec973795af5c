//! A host of two NUMA nodes with a disk on each: a guest's RAM is on the node of its device, or where its file says, and one that
//! has both disks sees two nodes, as far apart as the host's, with RAM, vCPUs and the disk of each.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use rustix::process::Signal;

use super::linux_nvme::NVME;
use super::topology;
use super::vmm_killed::signal;
use crate::agent::{Function, Guest, GuestPlan, L1, L2, NvmeDisk, kernel_log};
use crate::scenario::{Contents, Disk, Scenario, Variant, Variants};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "numa",
    about: "RAM on the NUMA node of the device, and a guest with devices of two nodes sees both, as far apart as the host's",
    // Linux as the testbed builds it knows of no nodes; Debian's does.
    variants: Variants::Only(Variant::Group),
    ports: 0,
    devices: &[
        "-object",
        "memory-backend-ram,id=near,size=1G",
        "-object",
        "memory-backend-ram,id=far,size=1G",
        "-numa",
        "node,nodeid=0,memdev=near,cpus=0",
        "-numa",
        "node,nodeid=1,memdev=far",
        "-numa",
        "dist,src=0,dst=1,val=31",
        "-device",
        "pxb-pcie,id=bus0,bus=pcie.0,bus_nr=64,numa_node=0",
        "-device",
        "pxb-pcie,id=bus1,bus=pcie.0,bus_nr=128,numa_node=1",
        "-device",
        "pcie-root-port,id=port0,bus=bus0,chassis=1",
        "-device",
        "pcie-root-port,id=port1,bus=bus1,chassis=2",
        "-drive",
        "file={first},if=none,id=drive0,format=raw,cache=unsafe",
        "-drive",
        "file={second},if=none,id=drive1,format=raw,cache=unsafe",
        "-device",
        "nvme,serial=near,drive=drive0,bus=port0",
        "-device",
        "nvme,serial=far,drive=drive1,bus=port1",
    ],
    disks: &[Disk { name: "first", mib: 16 }, Disk { name: "second", mib: 16 }],
    memory_mib: 2048,
    deadline: Duration::from_secs(1200),
    contents: Contents { linux_guest: true, bare_guest: true, ..Contents::NONE },
    l1,
    l2: Some(l2),
};

const TIMEOUT: Duration = Duration::from_secs(300);
const MIB: u64 = 1 << 20;
const HOST_SEED: u64 = 0x686f_7374;
const GUEST_SEED: u64 = 0x0067_7565_7374;
const LEN: usize = 256 << 10;
const GUEST_AT: u64 = 8 << 20;
/// `vm-service`'s exit status for a wrong guest file.
const USAGE: Option<i32> = Some(2);

/// The disk of node 0 and that of node 1, on the host and in the guest.
fn disks() -> Result<[Function; 2]> {
    let mut found = Function::find_all(NVME.0, NVME.1)?;
    found.sort_by_key(|function| function.attribute("numa_node"));
    let found: [Function; 2] = found.try_into().map_err(|found| anyhow!("the disks are {found:?}"))?;
    let nodes = found.each_ref().map(|function| function.attribute("numa_node").unwrap_or_default());
    ensure!(nodes == ["0", "1"], "the disks are on nodes {nodes:?}");
    Ok(found)
}

fn l1(l1: &mut L1) -> Result<()> {
    let [near, far] = disks()?;
    let listed = l1.vm_service(&["info", &far.address, "--json"], TIMEOUT)?.succeeded()?.json()?;
    let shown = listed.to_string();
    l1.prove(shown.contains(r#""numa_node":1"#), "the host's two nodes have a disk each").context(shown)?;

    // A guest without an operating system: its RAM is present once its device is attached.
    let plan = |name, device, settings| GuestPlan { settings, ..GuestPlan::bare(name, "spin", device) };
    for (plan, node) in [
        (plan("near", &near, ""), Some(0)),
        (plan("far", &far, ""), Some(1)),
        (plan("elsewhere", &far, "numa_nodes = [0]"), Some(0)),
        (plan("anywhere", &far, "numa_nodes = []"), None),
    ] {
        let mut guest = Guest::start(l1, &plan)?;
        guest.wait_for_log("attached in", TIMEOUT)?;
        let found = mib_by_node(&guest)?;
        let expect = node.map(|node| (node, u64::from(plan.memory_mib))).into_iter().collect();
        let name = plan.name;
        l1.prove(found == expect, format!("{name}: its RAM by node: {found:?} MiB, asked for {node:?}"))
            .with_context(|| format!("{expect:?}\n{}", numa_maps(&guest).unwrap_or_default()))?;
        signal(guest.pid(), Signal::TERM)?;
        guest.end(TIMEOUT)?.process.succeeded()?;
    }
    let refused = Guest::start(l1, &plan("nowhere", &far, "numa_nodes = [0, 3]"))?.end(TIMEOUT)?.process;
    let says = refused.stderr.contains("the host has no NUMA node 3, it has 0, 1");
    l1.prove(
        refused.code == USAGE && says && far.driver().as_deref() == Some("nvme"),
        "no such node: refused",
    )
    .with_context(|| format!("{:?} {} {:?}", refused.code, refused.stderr, far.driver()))?;

    let functions = [&near, &far];
    for disk in functions {
        NvmeDisk::of(disk)?.write_pattern(HOST_SEED, 0, LEN)?;
    }
    let far_apart = distances()?;
    let cmdline = format!("{} distances={far_apart}", topology::parameter(&functions)?);
    let plan = GuestPlan { cmdline: &cmdline, vcpus: 3, ..GuestPlan::linux("both", &near) };
    let plan = GuestPlan { memory_mib: 512, devices: functions.to_vec(), ..plan };
    let mut guest = Guest::start(l1, &plan)?;
    guest.wait_for_log("attached in", TIMEOUT)?;
    let found = mib_by_node(&guest)?;
    l1.prove(found == BTreeMap::from([(0, 256), (1, 256)]), format!("both: its RAM by node: {found:?} MiB"))?;
    guest.end(TIMEOUT)?.succeeded(l1)?;
    for disk in disks()? {
        ensure!(disk.driver().as_deref() == Some("nvme"), "{} is bound to {:?}", disk.address, disk.driver());
        NvmeDisk::of(&disk)?.check_pattern(GUEST_SEED, GUEST_AT, LEN)?;
    }
    l1.proved("the host's driver has both disks again, with what the guest wrote");
    Ok(())
}

fn numa_maps(guest: &Guest) -> Result<String> {
    Ok(fs::read_to_string(format!("/proc/{}/numa_maps", guest.vmm()?))?)
}

/// How much of a guest's RAM is on which node, in MiB, where that was asked for.
fn mib_by_node(guest: &Guest) -> Result<BTreeMap<u16, u64>> {
    let mut bytes: BTreeMap<u16, u64> = BTreeMap::new();
    let maps = numa_maps(guest)?;
    for line in maps.lines().filter(|line| line.contains(" prefer:")) {
        let size = line.split_once("kernelpagesize_kB=").map_or("", |(_, size)| size);
        let size: u64 = size.split_whitespace().next().unwrap_or_default().parse().unwrap_or(0);
        for word in line.split_whitespace() {
            let Some((node, pages)) = word.strip_prefix('N').and_then(|word| word.split_once('=')) else {
                continue;
            };
            *bytes.entry(node.parse()?).or_default() += pages.parse::<u64>()? * (size << 10);
        }
    }
    Ok(bytes.into_iter().map(|(node, bytes)| (node, bytes / MIB)).collect())
}

/// How far the nodes are from each other, a row for each.
fn distances() -> Result<String> {
    let row = |node| -> Result<String> {
        let row = fs::read_to_string(format!("/sys/devices/system/node/node{node}/distance"))?;
        Ok(row.split_whitespace().collect::<Vec<_>>().join(","))
    };
    Ok(format!("{}/{}", row(0)?, row(1)?))
}

fn l2(l2: &mut L2) -> Result<()> {
    let functions = disks()?;
    topology::compare(l2, &[&functions[0], &functions[1]])?;
    let (host, guest) = (l2.parameter("distances")?, distances()?);
    l2.prove(
        guest == host && guest.contains("31"),
        format!("nodes are as far apart as the host's: {guest}"),
    )?;
    let node =
        |node: u16, file: &str| fs::read_to_string(format!("/sys/devices/system/node/node{node}/{file}"));
    let cpus = [node(0, "cpulist")?, node(1, "cpulist")?].map(|cpus| cpus.trim().to_owned());
    l2.prove(cpus == ["0-1", "2"], format!("each has its vCPUs: {cpus:?}"))?;
    for number in 0..2 {
        let text = node(number, "meminfo")?;
        let total = text.lines().find_map(|line| line.split_once("MemTotal:")).context("no MemTotal")?.1;
        let kib: u64 = total.split_whitespace().next().unwrap_or_default().parse()?;
        // Linux keeps some of it to itself.
        l2.prove((150..=256).contains(&(kib >> 10)), format!("node {number} has {} MiB", kib >> 10))?;
    }
    let complaints: Vec<_> = kernel_log()?
        .lines()
        .filter(|line| line.contains("not on the same node"))
        .map(str::to_owned)
        .collect();
    l2.prove(complaints.is_empty(), "Linux finds caches and nodes consistent")
        .with_context(|| complaints.join("\n"))?;
    for disk in &functions {
        let disk = NvmeDisk::of(disk)?;
        disk.check_pattern(HOST_SEED, 0, LEN)?;
        disk.write_pattern(GUEST_SEED, GUEST_AT, LEN)?;
    }
    l2.prove(true, "the disk of each node is read and written")
}
