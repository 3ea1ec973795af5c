//! Tests of the parsers: answers as the Linux kernel gives them, and every way in which they can be wrong.

use proptest::prelude::*;

use super::*;

/// An answer: 32-bit words in order.
fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// A 64-bit field as two 32-bit words.
fn long(value: u64) -> [u32; 2] {
    let bytes = value.to_ne_bytes();
    let (first, second) = bytes.split_at(4);
    [first, second].map(|half| u32::from_ne_bytes(half.try_into().unwrap()))
}

/// A capability header.
fn header(id: u16, next: u32) -> [u32; 2] {
    let mut bytes = [0; 4];
    bytes[..2].copy_from_slice(&id.to_ne_bytes());
    bytes[2..].copy_from_slice(&1u16.to_ne_bytes());
    [u32::from_ne_bytes(bytes), next]
}

fn region_answer(flags: u32, size: u64, offset: u64, cap_offset: u32, tail: &[u32]) -> Vec<u8> {
    let mut all = vec![32 + 4 * tail.len() as u32, flags, 0, cap_offset];
    all.extend(long(size));
    all.extend(long(offset));
    all.extend(tail);
    words(&all)
}

fn sparse(next: u32, areas: &[(u64, u64)]) -> Vec<u32> {
    let mut all = header(1, next).to_vec();
    all.extend([areas.len() as u32, 0]);
    for &(offset, size) in areas {
        all.extend(long(offset));
        all.extend(long(size));
    }
    all
}

#[test]
fn regions() {
    /// Size and mappable areas.
    type Expect<'a> = Result<(u64, &'a [(u64, u64)]), &'a str>;

    fn check(answer: Vec<u8>, expect: Expect<'_>) {
        match (region(&answer, 0, 0x1000), expect) {
            (Ok(region), Ok((size, areas))) => {
                assert_eq!((region.info.size, &*region.info.mappable), (size, areas));
            }
            (Err(why), Err(expect)) => assert!(why.contains(expect), "{why}"),
            (got, expect) => panic!("{got:?}, expected {expect:?}"),
        }
    }
    const RW: u32 = 3;
    const MAP: u32 = 7;
    const CAPS: u32 = 15;
    check(region_answer(RW, 0x100, 7 << 40, 0, &[]), Ok((0x100, &[])));
    check(region_answer(0, 0, 0, 0, &[]), Ok((0, &[])));
    check(region_answer(MAP, 0x10_0000, 0, 0, &[]), Ok((0x10_0000, &[(0, 0x10_0000)])));
    // Less than a page can't be mapped on its own.
    check(region_answer(MAP, 0x800, 0, 0, &[]), Ok((0x800, &[])));
    check(region_answer(MAP, 0x1800, 0, 0, &[]), Ok((0x1800, &[(0, 0x1000)])));
    // Around an MSI-X table; areas come sorted and in whole pages.
    let areas = sparse(0, &[(0x3000, 0xd000), (0, 0x1800), (0x2800, 0x800), (0x2000, 0)]);
    check(region_answer(CAPS, 0x10000, 0, 32, &areas), Ok((0x10000, &[(0, 0x1000), (0x3000, 0xd000)])));
    check(region_answer(CAPS, 0x10000, 0, 32, &sparse(0, &[])), Ok((0x10000, &[])));
    // Mappable as a whole, MSI-X table included: the capability says only that it may be.
    check(region_answer(CAPS, 0x10000, 0, 32, &header(3, 0)), Ok((0x10000, &[(0, 0x10000)])));
    let mut chain = header(3, 40).to_vec();
    chain.extend(sparse(0, &[(0, 0x1000)]));
    check(region_answer(CAPS, 0x10000, 0, 32, &chain), Ok((0x10000, &[(0, 0x1000)])));

    check(region_answer(RW, u64::MAX, 1, 0, &[]), Err("of its file"));
    check(region_answer(RW, 1 << 63, 0, 0, &[]), Err("of its file"));
    check(region_answer(CAPS, 0x10000, 0, 32, &header(3, 32)), Err("without an end"));
    check(region_answer(CAPS, 0x10000, 0, 34, &header(3, 0)), Err("past its end"));
    check(region_answer(CAPS, 0x10000, 0, u32::MAX, &header(3, 0)), Err("past its end"));
    check(region_answer(CAPS, 0x10000, 0, 32, &header(1, 0)), Err("count of mappable areas"));
    let mut short = sparse(0, &[(0, 0x1000)]);
    short[2] = u32::MAX;
    check(region_answer(CAPS, 0x10000, 0, 32, &short), Err("in room for 1"));
    let overlap = sparse(0, &[(0, 0x2000), (0x1000, 0x1000)]);
    check(region_answer(CAPS, 0x10000, 0, 32, &overlap), Err("mappable area"));
    check(region_answer(CAPS, 0x10000, 0, 32, &sparse(0, &[(0xf000, 0x2000)])), Err("mappable area"));
    check(region_answer(CAPS, 0x10000, 0, 32, &sparse(0, &[(u64::MAX, 2)])), Err("mappable area"));
    check(Vec::new(), Err("too short"));
    check(vec![0; 31], Err("too short"));
    // The last byte that a file may have.
    check(region_answer(RW, 0x1000, i64::MAX as u64 - 0x1000, 0, &[]), Ok((0x1000, &[])));
    check(region_answer(RW, 0x1001, i64::MAX as u64 - 0x1000, 0, &[]), Err("of its file"));
    // Without the flag the offset of capabilities is ignored.
    check(region_answer(MAP, 0x10000, 0, 0x8000, &[]), Ok((0x10000, &[(0, 0x10000)])));
    // Only what has the flag can be mapped.
    check(region_answer(RW, 0x10000, 0, 0, &[]), Ok((0x10000, &[])));
    check(region_answer(CAPS & !4, 0x10000, 0, 32, &sparse(0, &[(0, 0x1000)])), Ok((0x10000, &[])));
    check(region_answer(MAP, 0, 0, 0, &[]), Ok((0, &[])));
    for (flags, readable, writable) in
        [(0, false, false), (1, true, false), (2, false, true), (3, true, true)]
    {
        let region = region(&region_answer(flags, 0x1000, 0, 0, &[]), 0, 0x1000).unwrap();
        assert_eq!((region.info.readable, region.info.writable), (readable, writable));
    }
}

#[test]
fn devices() {
    fn check(answer: &[u32], expect: Option<DeviceInfo>) {
        assert_eq!(device_info(&words(answer)).ok(), expect, "{answer:?}");
    }
    check(&[24, 3, 9, 5, 0, 0], Some(DeviceInfo { regions: 9, irqs: 5, reset: true }));
    check(&[24, 2, 11, 5, 0, 0], Some(DeviceInfo { regions: 11, irqs: 5, reset: false }));
    check(&[24, 4, 9, 5, 0, 0], None);
    check(&[24, 2, 8, 5, 0, 0], None);
    check(&[24, 2, u32::MAX, 5, 0, 0], None);
    check(&[24, 2, 9, u32::MAX, 0, 0], None);
    check(&[24, 2, 9, 32, 0, 0], Some(DeviceInfo { regions: 9, irqs: 32, reset: false }));
    check(&[24, 2, 9, 33, 0, 0], None);
    check(&[24, 2, 9], None);
}

#[test]
fn iommus() {
    fn check(flags: u32, sizes: u64, cap_offset: u32, tail: &[u32], expect: Result<IommuInfo, &str>) {
        let mut all = vec![24 + 4 * tail.len() as u32, flags];
        all.extend(long(sizes));
        all.extend([cap_offset, 0]);
        all.extend(tail);
        match (iommu_info(&words(&all), 0x1000), expect) {
            (Ok(info), Ok(expect)) => assert_eq!(info, expect),
            (Err(why), Err(expect)) => assert!(why.contains(expect), "{why}"),
            (got, expect) => panic!("{got:?}, expected {expect:?}"),
        }
    }
    let ranges = |pairs: &[(u64, u64)], next: u32| {
        let mut all = header(1, next).to_vec();
        all.extend([pairs.len() as u32, 0]);
        for &(start, end) in pairs {
            all.extend(long(start));
            all.extend(long(end));
        }
        all
    };
    let all = IommuInfo { page: 0x1000, ranges: vec![0..=u64::MAX], entries_left: None };
    check(0, 0, 0, &[], Ok(all.clone()));
    check(1, 0xffff_ffff_ffff_f000, 0, &[], Ok(all.clone()));
    check(1, 1 << 16, 0, &[], Ok(IommuInfo { page: 1 << 16, ..all.clone() }));
    check(1, 1 << 9, 0, &[], Ok(all.clone()));
    let mut tail = ranges(&[(0x10_0000, 0xfff_ffff), (0, 0xffff)], 72);
    tail.extend(header(3, 0));
    tail.push(65535);
    check(
        3,
        0x1000,
        24,
        &tail,
        Ok(IommuInfo {
            page: 0x1000,
            ranges: vec![0..=0xffff, 0x10_0000..=0xfff_ffff],
            entries_left: Some(65535),
        }),
    );
    // Without the flag the offset of capabilities is ignored.
    check(1, 0x1000, 0x8000, &[], Ok(all.clone()));
    // A range of one address.
    check(2, 0, 24, &ranges(&[(5, 5)], 0), Ok(IommuInfo { ranges: vec![5..=5], ..all.clone() }));
    check(1, 0, 0, &[], Err("no page size"));
    check(2, 0, 24, &ranges(&[(2, 1)], 0), Err("from 0x2 to 0x1"));
    check(2, 0, 24, &ranges(&[(0, 5), (5, 9)], 0), Err("ends at 0x5"));
    check(2, 0, 24, &ranges(&[(0, 5)], 24), Err("without an end"));
    let mut short = ranges(&[(0, 5)], 0);
    short[2] = 2;
    check(2, 0, 24, &short, Err("in room for 1"));
}

#[test]
fn hot_resets() {
    // Segment, bus and function are the second word of an entry.
    let entry = |group: u32, segment: u16, bus: u8, devfn: u8| {
        let mut bytes = [0; 4];
        bytes[..2].copy_from_slice(&segment.to_ne_bytes());
        bytes[2..].copy_from_slice(&[bus, devfn]);
        [group, u32::from_ne_bytes(bytes)]
    };
    let answer = |flags: u32, count: u32, entries: &[[u32; 2]]| {
        let mut all = vec![12 + 8 * entries.len() as u32, flags, count];
        all.extend(entries.as_flattened());
        words(&all)
    };
    let gpu = [entry(9, 0, 0x65, 0), entry(9, 0, 0x65, 1)];
    let functions = vec![("65:00.0".parse().unwrap(), 9), ("65:00.1".parse().unwrap(), 9)];
    let expect = |owned| Ok(HotResetInfo { functions: functions.clone(), owned });
    assert_eq!(hot_reset_info(&answer(0, 2, &gpu)), expect(None));
    assert_eq!(hot_reset_info(&answer(1, 2, &gpu)), expect(Some(false)));
    assert_eq!(hot_reset_info(&answer(3, 2, &gpu)), expect(Some(true)));
    assert!(hot_reset_info(&answer(0, 3, &gpu)).unwrap_err().contains("in room for 2"));
    assert!(hot_reset_info(&[]).is_err());
}

#[test]
fn sizes() {
    assert_eq!(wanted_size(&words(&[64])), Ok(64));
    assert_eq!(wanted_size(&words(&[1 << 20])), Ok(1 << 20));
    assert!(wanted_size(&words(&[(1 << 20) + 1])).is_err());
    assert!(wanted_size(&words(&[u32::MAX])).is_err());
    assert!(wanted_size(&[1, 2, 3]).is_err());
}

proptest! {
    /// Whatever the bytes, the parsers end, and what they let through can be.
    #[test]
    fn any_bytes(
        mut bytes in prop::collection::vec(any::<u8>(), 0..256),
        // Offsets and counts that are small enough to be followed.
        small in prop::collection::vec((0usize..256, 0u32..256), 0..24),
    ) {
        for (offset, value) in small {
            if let Some(field) = bytes.get_mut(offset & !3..).and_then(|rest| rest.first_chunk_mut()) {
                *field = value.to_ne_bytes();
            }
        }
        let _ = wanted_size(&bytes);
        let _ = device_info(&bytes);
        if let Ok(info) = hot_reset_info(&bytes) {
            prop_assert!(info.functions.len() <= bytes.len() / 8);
        }
        if let Ok(Region { info, offset }) = region(&bytes, 0, 0x1000) {
            prop_assert!(offset.checked_add(info.size).is_some());
            let mut previous = 0;
            for &(start, len) in &info.mappable {
                prop_assert!(len > 0 && start % 0x1000 == 0 && len % 0x1000 == 0);
                prop_assert!(start >= previous && start + len <= info.size);
                previous = start + len;
            }
        }
        if let Ok(info) = iommu_info(&bytes, 0x1000) {
            prop_assert!(info.page >= 0x1000 && info.page.is_power_of_two());
            prop_assert!(info.ranges.iter().all(|range| range.start() <= range.end()));
            prop_assert!(info.ranges.windows(2).all(|pair| pair[0].end() < pair[1].start()));
        }
    }
}
