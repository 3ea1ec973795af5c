//! How much memory the host has left for contents of devices.

use std::path::{Path, PathBuf};

/// What stays free beside them.
const SPARE: u64 = 256 << 20;

/// Bytes that this process may still have, by what files of the system say; none where they don't.
pub fn available(read: impl Fn(&Path) -> Option<String>) -> Option<u64> {
    let kibibytes = |text: &str| text.trim().strip_suffix("kB")?.trim().parse::<u64>().ok();
    let memory = read(Path::new("/proc/meminfo"))?;
    let free = memory.lines().find_map(|line| kibibytes(line.strip_prefix("MemAvailable:")?))? << 10;
    let number = |path: PathBuf| read(&path)?.trim().parse::<u64>().ok();
    let of_group = |folder: &Path, [used, most, files]: [&str; 3]| {
        let used = number(folder.join(used))?;
        let most = number(folder.join(most))?;
        // Pages of files are given up first.
        let files = read(&folder.join("memory.stat")).and_then(|text| {
            text.lines().find_map(|line| line.strip_prefix(files)?.trim().parse::<u64>().ok())
        });
        Some(most.saturating_sub(used.saturating_sub(files.unwrap_or(0))))
    };
    let groups = read(Path::new("/proc/self/cgroup")).unwrap_or_default();
    // `NUMBER:CONTROLLERS:/PATH`; the second version of groups has number 0 and no controllers, the first a tree of its own for memory.
    let limits = groups.lines().filter_map(|line| {
        let (controllers, group) = line.split_once(':')?.1.split_once(":/")?;
        let (root, names) = if controllers.is_empty() {
            ("/sys/fs/cgroup", ["memory.current", "memory.max", "inactive_file "])
        } else if controllers.split(',').any(|name| name == "memory") {
            let names = ["memory.usage_in_bytes", "memory.limit_in_bytes", "total_inactive_file "];
            ("/sys/fs/cgroup/memory", names)
        } else {
            return None;
        };
        let limit = |group| of_group(&Path::new(root).join(group), names);
        Path::new(group).ancestors().filter_map(limit).min()
    });
    Some(limits.fold(free, u64::min).saturating_sub(SPARE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_limit_counts() {
        let check = |files: &[(&str, &str)], expected: Option<u64>| {
            let read = |path: &Path| {
                let file = files.iter().find(|(name, _)| Path::new(name) == path)?;
                Some(file.1.to_owned())
            };
            assert_eq!(available(read), expected, "{files:?}");
        };
        let memory = ("/proc/meminfo", "MemTotal:  9 kB\nMemAvailable:    1048576 kB\n");
        let group = ("/proc/self/cgroup", "1:cpu:/other\n0::/a/b\n");
        let (limit, used) = (
            ("/sys/fs/cgroup/a/memory.max", "734003200\n"),
            ("/sys/fs/cgroup/a/memory.current", "104857600\n"),
        );
        check(&[], None);
        check(&[("/proc/meminfo", "MemAvailable: none")], None);
        check(&[memory], Some(768 << 20));
        check(&[memory, group], Some(768 << 20));
        check(&[memory, group, limit, used], Some(344 << 20));
        check(
            &[
                memory,
                group,
                limit,
                used,
                ("/sys/fs/cgroup/a/memory.stat", "anon 3\ninactive_file 1048576\n"),
            ],
            Some(345 << 20),
        );
        check(&[memory, group, used, ("/sys/fs/cgroup/a/memory.max", "max\n")], Some(768 << 20));
        check(&[memory, group, used, ("/sys/fs/cgroup/a/memory.max", "7\n")], Some(0));
        // The first version of groups, in a container that sees its own as the root.
        let (group, limit, used) = (
            ("/proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/docker/7\n0::/\n"),
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "734003200\n"),
            ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "104857600\n"),
        );
        check(&[memory, group], Some(768 << 20));
        check(&[memory, group, limit, used], Some(344 << 20));
        let files = ("/sys/fs/cgroup/memory/memory.stat", "inactive_file 7\ntotal_inactive_file 1048576\n");
        check(&[memory, group, limit, used, files], Some(345 << 20));
    }
}
