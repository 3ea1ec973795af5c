//! Tests of the checks before a mapping.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;

/// Memory that nobody touches, at an address of the test's choice.
#[derive(Debug)]
struct Fake {
    address: u64,
    len: u64,
}

// SAFETY: nothing in these tests accesses the memory.
#[allow(unsafe_code)]
unsafe impl Mapping for Fake {
    fn address(&self) -> u64 {
        self.address
    }

    fn len(&self) -> u64 {
        self.len
    }
}

fn fake(address: u64, len: u64) -> Arc<dyn Mapping> {
    Arc::new(Fake { address, len })
}

/// An x86 host's ranges with 39 bits.
fn x86() -> Vec<IovaRange> {
    vec![0..=0xfedf_ffff, 0xfef0_0000..=0x7f_ffff_ffff]
}

#[test]
fn ranges_are_checked_before_the_kernel_is_asked() {
    fn check(iova: u64, len: u64, allowed: &[IovaRange], left: Option<u64>, expect: Result<(), &str>) {
        let memory = fake(0x7f00_0000_0000, len);
        match (check_range(iova, &*memory, 0x1000, allowed, left), expect) {
            (Ok(()), Ok(())) => {}
            (Err(error), Err(expect)) => {
                assert!(error.to_string().contains(expect), "{iova:#x}+{len:#x}: {error}")
            }
            (got, expect) => panic!("{iova:#x}+{len:#x}: {got:?}, expected {expect:?}"),
        }
    }
    let all = &[0..=u64::MAX][..];
    check(0, 0x1000, &x86(), None, Ok(()));
    check(0, 0xfee0_0000, &x86(), Some(1), Ok(()));
    check(0xfef0_0000, 0x1000, &x86(), None, Ok(()));
    check(0x7f_ffff_f000, 0x1000, &x86(), None, Ok(()));
    check(u64::MAX - 0xfff, 0x1000, all, None, Ok(()));
    check(0, 0x1000, &x86(), Some(0), Err("0 entries are left"));
    check(0x800, 0x1000, &x86(), None, Err("multiples of 0x1000"));
    check(0, 0x800, &x86(), None, Err("multiples of 0x1000"));
    check(0, 0, &x86(), None, Err("not within 64 bits"));
    check(u64::MAX - 0xfff, 0x2000, all, None, Err("not within 64 bits"));
    check(0xfee0_0000, 0x1000, &x86(), None, Err("0xfee00000..=0xfeefffff is reserved"));
    check(0xfedf_f000, 0x2000, &x86(), None, Err("0xfee00000..=0xfeefffff is reserved"));
    check(0xfeef_f000, 0x2000, &x86(), None, Err("0xfee00000..=0xfeefffff is reserved"));
    check(0, 0x8000_0000_0000, &x86(), None, Err("0xfee00000..=0xfeefffff is reserved"));
    check(0x80_0000_0000, 0x1000, &x86(), None, Err("no address above 0x7fffffffff"));
    check(0x7f_ffff_f000, 0x2000, &x86(), None, Err("no address above 0x7fffffffff"));
    check(0, 0x1000, &[0x1000..=0x1fff], None, Err("0x0..=0xfff is reserved"));
    check(0, 0x1000, &[], None, Err("no address at all"));
    // Ranges that adjoin have no gap between them.
    let adjoining = &[0..=0xfff, 0x1000..=0x1fff, 0x3000..=0x3fff];
    check(0, 0x3000, adjoining, None, Err("0x2000..=0x2fff is reserved"));
    // What starts with a range hits nothing below it.
    check(0x1000, 0x2000, &[0x1000..=0x1fff], None, Err("no address above 0x1fff"));
}

#[test]
fn mappings_are_added_up_and_cleared() {
    let mut mappings = DmaMappings::default();
    assert_eq!(mappings.bytes(), 0);
    let memory = fake(0x10_0000, 0x2000);
    mappings.insert(0, memory.clone(), DmaPermission::ReadWrite);
    mappings.insert(0x8000, fake(0x20_0000, 0x3000), DmaPermission::Read);
    assert_eq!(mappings.bytes(), 0x5000);
    mappings.clear();
    assert_eq!((mappings.bytes(), Arc::strong_count(&memory)), (0, 1));
    assert!(fake(0, 0).is_empty() && !memory.is_empty());
}

#[test]
fn the_same_memory_is_counted() {
    let mut mappings = DmaMappings::default();
    let memory = fake(0x10_0000, 0x2000);
    assert_eq!(mappings.plan(0, &*memory, DmaPermission::ReadWrite).unwrap(), Plan::Map);
    mappings.insert(0, memory.clone(), DmaPermission::ReadWrite);
    assert_eq!(mappings.plan(0, &*memory, DmaPermission::ReadWrite).unwrap(), Plan::Counted);
    // Other rights, other memory, or another length is another mapping, and that overlaps.
    assert!(mappings.plan(0, &*memory, DmaPermission::Read).is_err());
    assert!(mappings.plan(0, &*fake(0x20_0000, 0x2000), DmaPermission::ReadWrite).is_err());
    assert!(mappings.plan(0, &*fake(0x10_0000, 0x1000), DmaPermission::ReadWrite).is_err());
    assert!(matches!(mappings.release(0), Ok(Release::Counted)));
    assert!(matches!(mappings.release(0), Ok(Release::Unmap(0x2000))));
    assert_eq!(Arc::strong_count(&memory), 2);
    mappings.remove(0);
    assert_eq!(Arc::strong_count(&memory), 1);
    assert!(mappings.release(0).is_err());
}

proptest! {
    /// The mappings lets exactly those mappings in that overlap no other, as a map of single pages has it.
    #[test]
    fn overlaps_as_page_by_page(requests in prop::collection::vec((0u64..24, 1u64..6, any::<bool>()), 1..40)) {
        let mut mappings = DmaMappings::default();
        let mut pages = [None; 32];
        for (number, (page, len, unmap)) in requests.into_iter().enumerate() {
            let iova = page << 12;
            if unmap {
                let first = pages[page as usize].filter(|&(start, _)| start == page);
                match (mappings.release(iova), first) {
                    (Ok(Release::Unmap(bytes)), Some((_, id))) => {
                        let count = pages.iter().flatten().filter(|&&(_, other)| other == id).count();
                        prop_assert_eq!(bytes >> 12, count as u64);
                        mappings.remove(iova);
                        for entry in &mut pages {
                            if entry.is_some_and(|(_, other)| other == id) {
                                *entry = None;
                            }
                        }
                    }
                    (Err(_), None) => {}
                    (got, expect) => prop_assert!(false, "{:?} for {:?}", got, expect),
                }
                continue;
            }
            // Every request has memory of its own, so nothing is ever counted.
            let memory = fake((number as u64 + 1) << 32, len << 12);
            let range = page as usize..(page + len) as usize;
            match mappings.plan(iova, &*memory, DmaPermission::ReadWrite) {
                Ok(Plan::Map) => {
                    prop_assert!(pages[range.clone()].iter().all(Option::is_none));
                    mappings.insert(iova, memory, DmaPermission::ReadWrite);
                    pages[range].fill(Some((page, number)));
                }
                Ok(Plan::Counted) => prop_assert!(false, "counted"),
                Err(_) => prop_assert!(pages[range].iter().any(Option::is_some)),
            }
        }
    }

    /// A range passes exactly when all of its ends and the gaps agree, and a refusal always has a reason.
    #[test]
    fn checks_never_panic(
        iova: u64,
        len: u64,
        address: u64,
        mut bounds in prop::collection::btree_set(any::<u64>(), 0..8),
    ) {
        if bounds.len() % 2 == 1 {
            bounds.pop_last();
        }
        let bounds: Vec<_> = bounds.into_iter().collect();
        let allowed: Vec<IovaRange> = bounds.chunks_exact(2).map(|pair| pair[0]..=pair[1]).collect();
        let memory = fake(address & !0xfff, len & !0xfff);
        let iova = iova & !0xfff;
        let fits = (len & !0xfff).checked_sub(1).and_then(|len| iova.checked_add(len)).is_some_and(|end| {
            allowed.iter().any(|range| range.contains(&iova) && range.contains(&end))
        });
        prop_assert_eq!(check_range(iova, &*memory, 0x1000, &allowed, None).is_ok(), fits);
    }
}
