//! The guest's RAM.

use super::*;

#[test]
fn iova_reserved() {
    let regions = "sys/kernel/iommu_groups/1/reserved_regions";
    let scene = |line: &str| Scene::new().write(regions, line);
    scene("0x0000000020000000 0x00000000200fffff reserved\n").check(
        Code::IovaReserved,
        Blocks,
        &["0x20000000-0x200fffff (reserved)", "RAM 0x0-0x3fffffff"],
        &["below 512 MiB"],
    );
    scene("0x0000000008000000 0x00000000080fffff msi\n").check(Code::IovaReserved, Blocks, &["(msi)"], &[]);
    for line in [
        "0x0000000040000000 0x00000000400fffff reserved\n",
        "0x00000000000e8000 0x00000000000effff direct-relaxable\n",
    ] {
        assert_eq!(scene(line).explain().blockers, [], "{line}");
    }
}

#[test]
fn iova_too_wide() {
    let mut scene = Scene::new();
    scene.options = ExplainOptions::for_memory(600 << 30);
    scene.check(Code::IovaTooWide, Blocks, &["translates 39 bits"], &["below 512 GiB"]);
    scene.options = ExplainOptions::for_memory(511 << 30);
    assert_eq!(scene.explain().blockers, []);
}

/// As much as a large host has, around what AMD's IOMMUs never translate.
#[test]
fn ram_lies_around_what_hypertransport_has() {
    let hypertransport = "0x000000fd00000000 0x000000ffffffffff reserved\n";
    for gib in [1012u64, 1013, 1500, 4096] {
        let mut scene = Scene::new()
            .write("sys/kernel/iommu_groups/1/reserved_regions", hypertransport)
            .write("proc/meminfo", "MemTotal: 8589934592 kB\n")
            .write("sys/devices/virtual/iommu/dmar0/intel-iommu/cap", "2f0000\n");
        scene.options = ExplainOptions::for_memory(gib << 30);
        assert_eq!(scene.options.memory(), gib << 30);
        assert_eq!(scene.explain().blockers, [], "{gib} GiB");
    }
}

#[test]
fn host_memory_too_low() {
    let scene = |total: &str, available: &str| {
        let mut scene = Scene::new();
        scene.options = ExplainOptions::for_memory(24 << 30);
        scene
            .write("proc/meminfo", &format!("MemTotal: {total}\nMemFree: 1 kB\nMemAvailable:  {available}\n"))
    };
    let small = &["24 GiB of RAM", "/meminfo gives 23 GiB in all"];
    scene("24117248 kB", "1048576 kB").check(Code::HostMemoryTooLow, Blocks, small, &["less memory"]);
    let busy = &["24 GiB of RAM", "/meminfo gives 1 GiB available now"];
    scene("33554432 kB", "1048576 kB").check(
        Code::HostMemoryTooLow,
        Warns,
        busy,
        &["less memory", "end what"],
    );
    // A cgroup has less, or one around it.
    let group = |limits: [&str; 3]| {
        let mut scene =
            scene("33554432 kB", "33554432 kB").write("proc/self/cgroup", "0::/a.slice/b.service\n");
        for (place, limit) in ["", "a.slice/", "a.slice/b.service/"].into_iter().zip(limits) {
            scene = scene.write(&format!("sys/fs/cgroup/{place}memory.max"), limit);
        }
        scene
    };
    let remedies = &["less memory", "MemoryMax="];
    let own = &["24 GiB of RAM", "a.slice/b.service/memory.max allows 8 GiB"];
    group(["max\n", "17179869184\n", "8589934592\n"]).check(Code::HostMemoryTooLow, Blocks, own, remedies);
    let outer = &["a.slice/memory.max allows 8 GiB"];
    group(["max\n", "8589934592\n", "max\n"]).check(Code::HostMemoryTooLow, Blocks, outer, remedies);
    assert_eq!(group(["max\n", "25769803776\n", "x"]).explain().blockers, []);
    let outside = group(["1\n", "1\n", "1\n"]).write("proc/self/cgroup", "0::/../../b\n1:memory:/a.slice\n");
    assert_eq!(outside.explain().blockers, []);
    // Nobody has asked for 1 GiB.
    let mut assumed = scene("524288 kB", "1 kB");
    assumed.options = ExplainOptions::default();
    assert_eq!(assumed.explain().blockers, []);
    for (total, available) in
        [("25165824 kB", "25165824 kB"), ("", "x"), ("99999999999999999999 kB", "18446744073709551615 kB")]
    {
        assert_eq!(scene(total, available).explain().blockers, [], "{total} {available}");
    }
}

#[test]
fn huge_pages_too_few() {
    const POOL: &str = "sys/kernel/mm/hugepages/hugepages-2048kB";
    let scene = |pages: RamPages, pool: &[(&str, u64)]| {
        let mut scene = Scene::new().write("proc/meminfo", "MemTotal: 8388608 kB\nMemAvailable: 1 kB\n");
        scene.options = ExplainOptions::for_memory(1 << 30);
        scene.options.pages = pages;
        pool.iter()
            .fold(scene, |scene, (name, pages)| scene.write(&format!("{POOL}/{name}"), &pages.to_string()))
    };
    let huge = RamPages::Huge(2 << 20);
    let check = |pool: &[(&str, u64)], has: &str, make: &str| {
        let evidence = &["1 GiB of RAM take 512 huge pages of 2 MiB", has];
        scene(huge, pool).check(
            Code::HugePagesTooFew,
            Blocks,
            evidence,
            &[make, "hugepages-2048kB/nr_hugepages"],
        );
    };
    check(&[("nr_hugepages", 0), ("free_hugepages", 0)], "has 0 that are free", "echo 512 >");
    check(&[("nr_hugepages", 600), ("free_hugepages", 511)], "has 511 that are free", "echo 601 >");
    let reserved = [("nr_hugepages", 600), ("free_hugepages", 600), ("resv_hugepages", 100)];
    check(&reserved, "has 500 that are free", "echo 612 >");
    let enough = [("nr_hugepages", 512), ("free_hugepages", 512), ("resv_hugepages", 0)];
    assert_eq!(scene(huge, &enough).explain().blockers, []);
    let more = [
        ("nr_hugepages", 0),
        ("free_hugepages", 0),
        ("nr_overcommit_hugepages", 600),
        ("surplus_hugepages", 88),
    ];
    assert_eq!(scene(huge, &more).explain().blockers, []);
    assert_eq!(scene(RamPages::HugeReserved, &[]).explain().blockers, []);
    let none = &["there is no", "hugepages-1048576kB", "1 GiB"];
    scene(RamPages::Huge(1 << 30), &enough).check(Code::HugePagesTooFew, Blocks, none, &["another size"]);
}

#[test]
fn memlock_too_low() {
    let limited = |limit, capabilities| {
        let scene = Scene::new();
        scene.sim.set_memlock(Some(limit)).unwrap();
        scene.sim.set_credentials(0, 0, capabilities).unwrap();
        scene
    };
    const DAC_OVERRIDE: u64 = 1 << 1;
    const IPC_LOCK: u64 = 1 << 14;
    limited(8 << 20, DAC_OVERRIDE).check(
        Code::MemlockTooLow,
        Blocks,
        &["needs 1 GiB locked", "allows 8 MiB", "iommufd counts"],
        &["ulimit -l 1048576", "LimitMEMLOCK=infinity"],
    );
    assert_eq!(limited(1 << 30, DAC_OVERRIDE).explain().blockers, []);
    assert_eq!(limited(8 << 20, IPC_LOCK | DAC_OVERRIDE).explain().blockers, []);
    // What is locked already counts too.
    let scene = limited(1 << 30, DAC_OVERRIDE);
    let status = format!("Uid: 0 0 0 0\nVmLck:\t 1024 kB\nCapEff:\t{DAC_OVERRIDE:016x}\n");
    scene.write("proc/self/status", &status).check(
        Code::MemlockTooLow,
        Blocks,
        &["1 MiB locked already"],
        &[],
    );
}

#[test]
fn memory_is_laid_around_the_hole() {
    for (bytes, expect) in [
        (0, vec![]),
        (1 << 30, vec![0..=0x3fff_ffff]),
        (3 << 30, vec![0..=0xbfff_ffff]),
        (4 << 30, vec![0..=0xbfff_ffff, 0x1_0000_0000..=0x1_3fff_ffff]),
        (1011 << 30, vec![0..=0xbfff_ffff, 0x1_0000_0000..=0xfc_ffff_ffff]),
        (
            1013 << 30,
            vec![0..=0xbfff_ffff, 0x1_0000_0000..=0xfc_ffff_ffff, 0x100_0000_0000..=0x100_7fff_ffff],
        ),
    ] {
        let options = ExplainOptions::for_memory(bytes);
        assert_eq!(options.ram, expect);
        assert_eq!(options.memory(), bytes);
    }
    ExplainOptions::for_memory(u64::MAX).memory();
}

/// Pages of 1 GiB need memory in one piece, which a host has early after a boot.
#[test]
fn only_the_fix_for_large_huge_pages_tells_when() {
    for (size, is_large) in [(2u64 << 20, false), (1 << 30, true)] {
        let pool = format!("sys/kernel/mm/hugepages/hugepages-{}kB", size >> 10);
        let scene = Scene::new()
            .write(&format!("{pool}/nr_hugepages"), "0\n")
            .write(&format!("{pool}/free_hugepages"), "0\n");
        let found = check_huge_pages(&scene.sim.plain_host(), size, 4 << 30).unwrap_err();
        assert_eq!(found.remedy.contains("early after a boot"), is_large, "{found}");
    }
}
