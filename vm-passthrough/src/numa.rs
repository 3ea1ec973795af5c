//! The host's NUMA nodes (Linux, `Documentation/ABI/stable/sysfs-devices-node`).

use crate::{Host, files};

/// Most processors that Linux can be built for (`CONFIG_NR_CPUS`).
const MOST_CPUS: u32 = 8192;
/// Most nodes likewise (`CONFIG_NODES_SHIFT`).
const MOST_NODES: u32 = 1024;

/// A NUMA node of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumaNode {
    /// Its number, as in [`PciFunction::numa_node`](crate::PciFunction::numa_node).
    pub id: u16,
    /// Numbers of its processors that are online; none for a node of memory alone.
    pub cpus: Vec<u32>,
    /// Whether it has memory.
    pub has_memory: bool,
    /// How far each online node is, in the order of their numbers: 10 is itself (ACPI 6.5, 5.2.17).
    pub distances: Vec<(u16, u8)>,
}

impl NumaNode {
    /// How far another node is; `None` when neither says it.
    pub fn distance(&self, other: u16) -> Option<u8> {
        self.distances.iter().find(|(id, _)| *id == other).map(|&(_, distance)| distance)
    }
}

/// The host's online nodes in the order of their numbers; none where Linux knows of none.
pub fn nodes(host: &Host) -> Vec<NumaNode> {
    let directory = host.sys.join("devices/system/node");
    let list = |file: &str, most| {
        files::read_trimmed(&directory.join(file)).and_then(|text| numbers(&text, most)).unwrap_or_default()
    };
    let ids: Vec<u16> = list("online", MOST_NODES).into_iter().filter_map(|id| id.try_into().ok()).collect();
    // Where Linux does not say it, each has.
    let with_memory = files::read_trimmed(&directory.join("has_memory"));
    let with_memory = with_memory.and_then(|text| numbers(&text, MOST_NODES));
    let node = |&id: &u16| {
        let distances =
            files::read_trimmed(&directory.join(format!("node{id}/distance"))).unwrap_or_default();
        let distances = distances.split_whitespace().map_while(|distance| distance.parse().ok());
        NumaNode {
            id,
            has_memory: with_memory.as_ref().is_none_or(|nodes| nodes.contains(&id.into())),
            cpus: list(&format!("node{id}/cpulist"), MOST_CPUS),
            distances: ids.iter().copied().zip(distances).collect(),
        }
    };
    ids.iter().map(node).collect()
}

/// The numbers below `end` of a list of ranges, as in `0-3,8`, ascending; `None` for what is no such list.
fn numbers(text: &str, end: u32) -> Option<Vec<u32>> {
    let mut numbers = Vec::new();
    for range in text.split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        if last >= end || numbers.last().is_some_and(|&before| first <= before) {
            return None;
        }
        numbers.extend(first..=last);
    }
    Some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::SimHost;

    #[test]
    fn lists_of_numbers() {
        fn check(text: &str, expect: Option<&[u32]>) {
            assert_eq!(numbers(text, 16).as_deref(), expect, "{text:?}");
        }
        check("", Some(&[]));
        check("0", Some(&[0]));
        check("0-2,4", Some(&[0, 1, 2, 4]));
        check("15", Some(&[15]));
        check("0-16", None);
        check("0-4294967295", None);
        check("3-1", Some(&[]));
        check("0-3,2", None);
        check("-1", None);
        check("a", None);
        check("0-", None);
        check("0x1", None);
    }

    #[test]
    fn nodes_have_processors_and_distances() {
        let sim = SimHost::new().unwrap();
        let host = sim.plain_host();
        assert_eq!(nodes(&host), []);
        let write = |file: &str, text: &str| {
            let path = host.sys.join("devices/system/node").join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("online", "0,2\n");
        write("node0/cpulist", "0-1\n");
        write("node0/distance", "10 21\n");
        write("node2/cpulist", "\n");
        write("node2/distance", "21 x\n");
        let node = |id, has_memory, cpus: &[u32], distances: &[(u16, u8)]| NumaNode {
            id,
            has_memory,
            cpus: cpus.to_vec(),
            distances: distances.to_vec(),
        };
        let found = nodes(&host);
        assert_eq!(found, [node(0, true, &[0, 1], &[(0, 10), (2, 21)]), node(2, true, &[], &[(0, 21)])]);
        assert_eq!((found[0].distance(2), found[1].distance(2)), (Some(21), None));
        write("has_memory", "0\n");
        assert_eq!(nodes(&host).iter().map(|node| node.has_memory).collect::<Vec<_>>(), [true, false]);
    }
}
