//! The guest's NUMA nodes, each on one of the host's: where its RAM and its vCPUs are, and what it is shown of that.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use vm_passthrough::numa::NumaNode;

use crate::config::{GuestConfig, MAX_NUMA_NODES};

/// The nodes of a guest. Without any, its RAM and vCPUs are where Linux puts them; one of two or more is a node of the guest's own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuestNuma {
    nodes: Vec<GuestNode>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct GuestNode {
    /// The host's.
    host: u16,
    /// The host's processors on it.
    cpus: Vec<u32>,
    /// How far each of the guest's nodes is.
    distances: Vec<u8>,
}

/// Why a guest can't have these nodes.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum NumaError {
    /// The host has no such node.
    #[error("the host has no NUMA node {node}, it has {}; change `numa_nodes`", numbers(.there))]
    NoNode {
        /// The node.
        node: u16,
        /// Those that it has.
        there: Vec<u16>,
    },
    /// A node of the host has none.
    #[error("NUMA node {0} of the host has no memory; change `numa_nodes`")]
    NoMemory(u16),
    /// A node would have no RAM.
    #[error(
        "RAM of {memory} bytes can't be split into {nodes} parts of whole pages of {page} bytes; raise `memory`, or name fewer `numa_nodes`"
    )]
    TooLittleRam {
        /// Its RAM.
        memory: u64,
        /// How many nodes.
        nodes: usize,
        /// The size of the pages.
        page: u64,
    },
    /// There are not as many APIC ids.
    #[error(
        "{vcpus} vCPUs on {nodes} nodes take more than the 255 APIC ids that there are; lower `vcpus`, or name fewer `numa_nodes`"
    )]
    TooManyVcpus {
        /// Its vCPUs.
        vcpus: u8,
        /// How many nodes.
        nodes: usize,
    },
}

fn numbers(nodes: &[u16]) -> String {
    match nodes {
        [] => "none".into(),
        nodes => nodes.iter().map(u16::to_string).collect::<Vec<_>>().join(", "),
    }
}

/// Where a vCPU is among the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct VcpuPlace {
    pub(super) apic_id: u8,
    /// The guest's node, and so its package.
    pub(super) node: u8,
    /// Its number in the package, and how many are there.
    pub(super) core: u8,
    pub(super) cores: u8,
    /// Bits of an APIC id that tell those of a package apart.
    pub(super) bits: u32,
}

impl GuestNuma {
    /// On these nodes of the host, of which it has `nodes`.
    ///
    /// # Errors
    /// When the host has not all of them.
    pub fn on(chosen: &[u16], nodes: &[NumaNode]) -> Result<Self, NumaError> {
        let find = |&id: &u16| {
            let there = || nodes.iter().map(|node| node.id).collect();
            nodes
                .iter()
                .find(|node| node.id == id)
                .ok_or_else(|| NumaError::NoNode { node: id, there: there() })
        };
        let found: Vec<&NumaNode> = chosen.iter().take(MAX_NUMA_NODES).map(find).collect::<Result<_, _>>()?;
        if let Some(node) = found.iter().find(|node| !node.has_memory) {
            return Err(NumaError::NoMemory(node.id));
        }
        let node = |node: &&NumaNode| GuestNode {
            host: node.id,
            cpus: node.cpus.clone(),
            distances: found.iter().map(|other| distance(node, other)).collect(),
        };
        Ok(Self { nodes: found.iter().map(node).collect() })
    }

    /// On the nodes of its devices, as far as it can be split: the nearest with memory for each that has none.
    pub fn of_devices(
        devices: impl IntoIterator<Item = u16>,
        config: &GuestConfig,
        nodes: &[NumaNode],
    ) -> Self {
        let with_memory = |id: u16| {
            let node = nodes.iter().find(|node| node.id == id)?;
            nodes.iter().filter(|node| node.has_memory).min_by_key(|other| distance(node, other))
        };
        let mut chosen: Vec<u16> = devices.into_iter().filter_map(with_memory).map(|node| node.id).collect();
        chosen.sort_unstable();
        chosen.dedup();
        loop {
            match Self::on(&chosen, nodes) {
                Ok(numa) if numa.check(config).is_ok() => return numa,
                _ if chosen.pop().is_some() => {}
                _ => return Self::default(),
            }
        }
    }

    /// Checks that a guest can be split among them.
    ///
    /// # Errors
    /// When it can't.
    pub fn check(&self, config: &GuestConfig) -> Result<(), NumaError> {
        // Where RAM begins and ends is on whole pages.
        #[allow(clippy::single_range_in_vec_init)]
        let ram = [0..config.memory];
        self.ram(&ram, config.ram_page()).and(self.vcpus(config.vcpus)).map(drop)
    }

    /// The host's nodes, in the order of the guest's.
    pub fn hosts(&self) -> impl ExactSizeIterator<Item = u16> {
        self.nodes.iter().map(|node| node.host)
    }

    /// Whether the guest has nodes of its own.
    pub(super) fn is_shown(&self) -> bool {
        self.nodes.len() > 1
    }

    /// The host's processors for what runs on a node of the guest.
    pub(super) fn cpus(&self, node: u8) -> &[u32] {
        self.nodes.get(usize::from(node)).map_or(&[], |node| &node.cpus)
    }

    /// How far the guest's nodes are from each other, a row for each.
    pub(super) fn distances(&self) -> impl Iterator<Item = &[u8]> {
        self.nodes.iter().map(|node| &node.distances[..])
    }

    /// Places vCPUs: the first of them on the first node, and as many on each as can be.
    ///
    /// # Errors
    /// When there are too few APIC ids.
    pub(super) fn vcpus(&self, vcpus: u8) -> Result<Vec<VcpuPlace>, NumaError> {
        let nodes = self.nodes.len().max(1);
        let too_many = || NumaError::TooManyVcpus { vcpus, nodes };
        let each = usize::from(vcpus) / nodes;
        let more = usize::from(vcpus) % nodes;
        let most = u8::try_from(each + usize::from(more > 0)).map_err(|_| too_many())?;
        let bits = u8::BITS - most.saturating_sub(1).leading_zeros();
        let places = (0..nodes).flat_map(|node| {
            let cores = each + usize::from(node < more);
            (0..cores).map(move |core| (node, core, cores))
        });
        places
            .map(|(node, core, cores)| {
                // 255 is for all of them.
                let apic_id = u8::try_from(node << bits | core).ok().filter(|&id| id < u8::MAX);
                let (node, core, cores) = (node as u8, core as u8, cores as u8);
                Ok(VcpuPlace { apic_id: apic_id.ok_or_else(too_many)?, node, core, cores, bits })
            })
            .collect()
    }

    /// Splits RAM evenly, each part of whole pages of `page` bytes: which node has which addresses. Nothing where there are no
    /// nodes.
    ///
    /// # Errors
    /// When a node would have none.
    pub(super) fn ram(&self, ram: &[Range<u64>], page: u64) -> Result<Vec<(u8, Range<u64>)>, NumaError> {
        let (nodes, memory) =
            (self.nodes.len(), ram.iter().map(|range| range.end - range.start).sum::<u64>());
        let share = memory / (nodes as u64).max(1) / page * page;
        if nodes > 0 && share == 0 {
            return Err(NumaError::TooLittleRam { memory, nodes, page });
        }
        let (mut parts, mut ranges) = (Vec::new(), ram.iter().cloned());
        let mut left = ranges.next();
        for node in 0..nodes {
            let mut wanted = if node + 1 == nodes { u64::MAX } else { share };
            while let Some(range) = left.take() {
                let middle = range.end.min(range.start.saturating_add(wanted));
                wanted -= middle - range.start;
                parts.push((node as u8, range.start..middle));
                left = if middle < range.end { Some(middle..range.end) } else { ranges.next() };
                if wanted == 0 {
                    break;
                }
            }
        }
        Ok(parts)
    }
}

/// How far `other` is from `node`. What the host does not say is what Linux takes: 10 for the same, 20 for another.
fn distance(node: &NumaNode, other: &NumaNode) -> u8 {
    match node.distance(other.id) {
        _ if node.id == other.id => 10,
        Some(distance @ 11..) => distance,
        _ => 20,
    }
}

#[cfg(test)]
// RAM is a list of ranges, often of one.
#[allow(clippy::single_range_in_vec_init)]
mod tests {
    use std::path::Path;

    use super::*;

    fn host() -> Vec<NumaNode> {
        let node = |id: u16, distances: &[u8]| NumaNode {
            id,
            has_memory: id < 3,
            cpus: vec![u32::from(id) * 2, u32::from(id) * 2 + 1],
            distances: (0..).zip(distances.iter().copied()).collect(),
        };
        vec![node(0, &[10, 21, 31]), node(1, &[22, 10, 0]), node(2, &[]), node(3, &[40, 15, 20, 10])]
    }

    fn on(chosen: &[u16]) -> Result<GuestNuma, NumaError> {
        GuestNuma::on(chosen, &host())
    }

    #[test]
    fn nodes_mirror_the_hosts() {
        let numa = on(&[2, 0]).unwrap();
        assert_eq!(numa.hosts().collect::<Vec<_>>(), [2, 0]);
        assert_eq!(numa.distances().collect::<Vec<_>>(), [[10, 20], [31, 10]]);
        assert_eq!((numa.cpus(0), numa.cpus(1), numa.cpus(2)), (&[4, 5][..], &[0, 1][..], &[][..]));
        assert_eq!(on(&[0, 1]).unwrap().distances().collect::<Vec<_>>(), [[10, 21], [22, 10]]);
        assert!(!on(&[1]).unwrap().is_shown() && numa.is_shown() && !on(&[]).unwrap().is_shown());
        let error = on(&[0, 4]).unwrap_err().to_string();
        assert_eq!(error, "the host has no NUMA node 4, it has 0, 1, 2, 3; change `numa_nodes`");
        assert_eq!(on(&[0, 3]), Err(NumaError::NoMemory(3)));
    }

    #[test]
    fn devices_choose_nodes_that_the_guest_can_be_split_among() {
        let text = "name = \"a\"\nmemory = \"8M\"\n[boot]\nkernel = \"k\"\n";
        let config = GuestConfig::parse(text, Path::new("/a.toml")).unwrap();
        let check = |devices: &[u16], memory: u64, hugepages, vcpus, expect: &[u16]| {
            let config = GuestConfig { memory, hugepages, vcpus, ..config.clone() };
            let numa = GuestNuma::of_devices(devices.iter().copied(), &config, &host());
            assert_eq!(numa.hosts().collect::<Vec<_>>(), expect, "{devices:?}");
        };
        check(&[], 8 << 20, None, 1, &[]);
        check(&[2, 0, 2], 8 << 20, None, 1, &[0, 2]);
        // Node 3 has no memory, and 1 is the nearest; the host has no node 7.
        check(&[3, 7], 8 << 20, None, 1, &[1]);
        check(&[0, 1, 2], 4 << 20, None, 1, &[0, 1]);
        check(&[0, 1], 1 << 30, Some(1 << 30), 1, &[0]);
        check(&[0, 1, 2], 8 << 20, None, 255, &[0, 1]);
    }

    #[test]
    fn vcpus_are_spread() {
        fn check(nodes: &[u16], vcpus: u8, expect: &[(u8, u8, u8, u8)]) {
            let places = on(nodes).unwrap().vcpus(vcpus).unwrap();
            let places: Vec<_> = places.iter().map(|at| (at.apic_id, at.node, at.core, at.cores)).collect();
            assert_eq!(places, expect, "{nodes:?} {vcpus}");
        }
        check(&[], 2, &[(0, 0, 0, 2), (1, 0, 1, 2)]);
        check(&[1], 2, &[(0, 0, 0, 2), (1, 0, 1, 2)]);
        check(&[0, 1], 1, &[(0, 0, 0, 1)]);
        check(&[0, 1], 2, &[(0, 0, 0, 1), (1, 1, 0, 1)]);
        check(&[0, 1], 3, &[(0, 0, 0, 2), (1, 0, 1, 2), (2, 1, 0, 1)]);
        check(&[0, 1, 2], 4, &[(0, 0, 0, 2), (1, 0, 1, 2), (2, 1, 0, 1), (4, 2, 0, 1)]);
        let last = |nodes: &[u16], vcpus| {
            on(nodes).unwrap().vcpus(vcpus).map(|places| places.last().map(|at| at.apic_id))
        };
        assert_eq!((last(&[], 255), last(&[0, 1], 255)), (Ok(Some(254)), Ok(Some(254))));
        assert_eq!(last(&[0, 1, 2], 255), Err(NumaError::TooManyVcpus { vcpus: 255, nodes: 3 }));
    }

    #[test]
    fn ram_is_split() {
        const MIB: u64 = 1 << 20;
        fn check(nodes: &[u16], ram: &[Range<u64>], page: u64, expect: &[(u8, Range<u64>)]) {
            let mib = |range: &Range<u64>| range.start * MIB..range.end * MIB;
            let ram: Vec<_> = ram.iter().map(mib).collect();
            let expect: Vec<_> = expect.iter().map(|(node, range)| (*node, mib(range))).collect();
            assert_eq!(on(nodes).unwrap().ram(&ram, page * MIB).unwrap(), expect, "{nodes:?} {ram:x?}");
        }
        check(&[], &[0..64], 2, &[]);
        check(&[1], &[0..64], 2, &[(0, 0..64)]);
        check(&[1], &[0..64, 128..256], 2, &[(0, 0..64), (0, 128..256)]);
        check(&[0, 1], &[0..66], 2, &[(0, 0..32), (1, 32..66)]);
        check(&[0, 1], &[0..64, 128..192], 2, &[(0, 0..64), (1, 128..192)]);
        check(&[0, 1], &[0..96, 128..160], 2, &[(0, 0..64), (1, 64..96), (1, 128..160)]);
        check(&[0, 1, 2], &[0..32, 128..160], 2, &[(0, 0..20), (1, 20..32), (1, 128..136), (2, 136..160)]);
        check(&[0, 1], &[0..3072], 1024, &[(0, 0..1024), (1, 1024..3072)]);
        let error = on(&[0, 1]).unwrap().ram(&[0..1 << 30], 1 << 30).unwrap_err();
        assert_eq!(error, NumaError::TooLittleRam { memory: 1 << 30, nodes: 2, page: 1 << 30 });
    }
}
