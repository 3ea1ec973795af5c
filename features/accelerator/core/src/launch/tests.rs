//! What is packed, and what is refused.

use vm_abi::{Element, Swizzle, Tile};

use super::*;
use crate::artifact::{Extent, Signature};
use crate::memory::{Memory, MemoryKind};

pub(crate) fn artifact(kinds: Vec<ParameterKind>, guarded: bool) -> Artifact {
    let parameters = (0..).zip(kinds).map(|(index, kind)| Parameter { name: format!("p{index}"), kind });
    let (parameters, entry) = (parameters.collect(), "k".into());
    let signature = Signature {
        entry,
        block: [1; 3],
        cluster: 1,
        shared_bytes: 0,
        parameters,
        tiles: vec![],
        guarded,
        cost_bound: u64::MAX,
    };
    // SAFETY: it is never run.
    #[allow(unsafe_code)]
    unsafe { Artifact::new([], signature) }.unwrap()
}

pub(crate) fn memory(address: u64, bytes: u64) -> Memory {
    // SAFETY: nobody reaches it.
    #[allow(unsafe_code)]
    unsafe {
        Memory::from_raw(MemoryKind::Device, address, 0, bytes)
    }
}

#[test]
fn grids_that_do_not_fit_are_refused() {
    let info = DeviceInfo {
        name: "the device".into(),
        backend: "none",
        target: String::new(),
        address: None,
        driver: String::new(),
        memory_bytes: 0,
        compute_units: 1,
        warp_size: 1,
        block_threads: 1,
        block: [1; 3],
        grid: [1000, 10, 10],
        shared_bytes: 0,
        parameter_bytes: 0,
        unified: false,
        host_registration: false,
        guards: false,
    };
    let signature = |cluster| Signature { cluster, ..artifact(vec![], false).signature().clone() };
    let check_on = |info: &DeviceInfo, grid: [u32; 3], cluster, wanted: Option<&str>| {
        let found = Grid(grid).check(&signature(cluster), info).err().map(|error| error.to_string());
        assert_eq!(found.is_some(), wanted.is_some(), "{found:?}");
        let said = found.unwrap_or_default();
        assert!(said.contains(wanted.unwrap_or_default()), "{said}");
    };
    let check = |grid, cluster, wanted| check_on(&info, grid, cluster, wanted);
    check([1000, 10, 10], 1, None);
    check([1001, 1, 1], 1, Some("the device takes at most 1000 along x"));
    check([1, 11, 1], 1, Some("at most 10 along y"));
    check([4, 1, 0], 1, Some("no blocks along z"));
    check([8, 3, 1], 4, None);
    check([6, 4, 1], 4, Some("its clusters need a multiple of 4 along x"));
    check([0, 1, 1], 4, Some("no blocks along x"));
    // A device's limits do not raise those that compilers assume.
    let all = DeviceInfo { grid: [u32::MAX; 3], ..info.clone() };
    let check = |grid, wanted| check_on(&all, grid, 1, wanted);
    check([i32::MAX as u32, 1, 1], None);
    check([1, 65_535, 65_535], None);
    check([1 << 31, 1, 1], Some("a kernel takes at most 2147483647 along x"));
    check([1, 65_536, 1], Some("a kernel takes at most 65535 along y"));
    check([1, 1, 65_536], Some("a kernel takes at most 65535 along z"));
}

#[test]
fn the_block_holds_what_the_kernel_reads() {
    let view = |rank| ParameterKind::View {
        extents: vec![Extent::Any; rank],
        element: Element::F16,
        align: 2,
        writes: true,
    };
    let scalar = |bytes| ParameterKind::Scalar { bytes, range: None };
    let kinds = vec![scalar(1), scalar(2), scalar(4), view(1), view(3), scalar(8)];
    let artifact = artifact(kinds, true);
    let (row, cube, word) = (memory(0x1000, 20), memory(0x2000, 1000), memory(0x3000, 4));
    let arguments = [
        QueueArgument::Scalar(0xffu8.into()),
        QueueArgument::Scalar((-2i16).into()),
        QueueArgument::Scalar(1.0f32.into()),
        QueueArgument::View(row.region(), Extents::WHOLE),
        QueueArgument::View(cube.region(), Extents::strided(&[2, 3, 4], &[400, 100]).unwrap()),
        QueueArgument::Scalar((-1i64).into()),
    ];
    let mut packed = Arguments::new(&artifact, arguments).unwrap();
    packed.guard(&artifact, word.region(), 77).unwrap();
    let first = 0xff | 0xfffe << 16 | u64::from(1.0f32.to_bits()) << 32;
    let want = [first, 0x1000, 10, 0x2000, 2, 3, 4, 400, 100, u64::MAX, 0x3000, 77];
    assert_eq!((packed.words(), packed.bytes()), (&want[..], 96));
    assert!(packed.guard(&artifact, row.region(), 1).is_err(), "a cancel flag has 4 bytes");
}

#[test]
fn numbers_out_of_range_and_views_that_overlap_are_refused() {
    let range = |bytes, least, greatest| {
        artifact(vec![ParameterKind::Scalar { bytes, range: Some((least, greatest)) }], false)
    };
    let check = |bytes, (least, greatest), scalar: Scalar, good: bool| {
        let packed = Arguments::new(&range(bytes, least, greatest), [QueueArgument::Scalar(scalar)]);
        assert_eq!(packed.is_ok(), good, "{scalar:?} in {least}..={greatest}");
    };
    check(4, (1, 1000), 1000u32.into(), true);
    check(4, (1, 1000), 0u32.into(), false);
    check(4, (1, 1000), 1001u32.into(), false);
    check(4, (-5, -1), (-3i32).into(), true);
    check(4, (0, i64::MAX), (-3i32).into(), false);
    check(1, (-128, 0), 0x80u8.into(), true);
    check(8, (i64::MIN, -1), u64::MAX.into(), true);
    check(8, (0, 1), (1u64 << 32).into(), false);
    check(1, (0, 1), true.into(), true);
    // Bits above the number's length are not part of it.
    check(1, (0, 1), Scalar::from_bits(0xff00, 1), true);

    let view = |writes| ParameterKind::View {
        extents: vec![Extent::Any; 2],
        element: Element::F32,
        align: 16,
        writes,
    };
    let three = artifact(vec![view(false), view(true), view(false)], false);
    let memory = memory(0x1000, 0x1000);
    let part = |offset, rows| {
        let region = memory.region().slice(offset, 16 * rows).unwrap();
        QueueArgument::View(region, Extents::packed(&[rows, 4]).unwrap())
    };
    let check = |views: [QueueArgument<'_>; 3], want: Option<&str>| {
        let got = Arguments::new(&three, views).err().map(|error| error.to_string());
        assert_eq!(got.is_some(), want.is_some(), "{got:?}");
        assert!(got.unwrap_or_default().contains(want.unwrap_or_default()), "{want:?}");
    };
    check([part(0, 4), part(64, 4), part(128, 4)], None);
    check([part(0, 4), part(64, 4), part(0, 4)], None);
    check([part(0, 5), part(64, 4), part(128, 4)], Some("p1: it is written, and overlaps the view p0"));
    check([part(0, 4), part(64, 5), part(128, 4)], Some("overlaps the view p2"));
    check([part(0, 4), part(64, 0), part(0, 8)], None);
    check([part(0, 4), part(68, 4), part(256, 1)], Some("not aligned to 16"));
    let folded = Extents::strided(&[4, 8], &[16]).unwrap();
    let folded = QueueArgument::View(memory.region().slice(512, 256).unwrap(), folded);
    check([folded, part(64, 1), part(0, 1)], None);
    check([part(0, 1), folded, part(64, 1)], Some("its rows overlap"));
}

#[test]
#[allow(unsafe_code)]
fn surfaces_are_given_for_surfaces_alone() {
    let extents = || vec![Extent::Any, Extent::Any, Extent::Fixed(4)];
    let surface = |writes| ParameterKind::Surface { extents: extents(), element: Element::U8, writes };
    let view = ParameterKind::View { extents: extents(), element: Element::U8, align: 1, writes: false };
    // SAFETY: nothing runs that would reach them.
    let level = |handle| unsafe { Memory::from_raw(MemoryKind::Surface, handle, 0, 0) };
    let (one, other, buffer) = (level(7), level(8), memory(0x1000, 0x1000));
    let of = |memory: &'static Memory, extents: &[u64]| {
        QueueArgument::View(memory.region(), Extents::packed(extents).unwrap())
    };
    let [one, other, buffer] = [one, other, buffer].map(|memory| &*Box::leak(Box::new(memory)));
    let size = [16, 32, 4];
    let check = |kinds: [ParameterKind; 2], given: [QueueArgument<'_>; 2], want: Option<&str>| {
        let got = Arguments::new(&artifact(kinds.to_vec(), false), given);
        match (got, want) {
            (Ok(packed), None) => assert_eq!(packed.words()[..4], [7, 16, 32, 4]),
            (Err(error), Some(want)) => assert!(error.to_string().contains(want), "{error}, not {want}"),
            (got, want) => panic!("{:?}, not {want:?}", got.map(|_| ())),
        }
    };
    check([surface(true), surface(false)], [of(one, &size), of(other, &size)], None);
    check([surface(false), surface(false)], [of(one, &size), of(one, &size)], None);
    let same = Some("p1: it is written, and is the surface p0 too");
    check([surface(false), surface(true)], [of(one, &size), of(one, &size)], same);
    check([surface(true), surface(false)], [of(one, &[16, 32, 2]), of(other, &size)], Some("is not 4"));
    let wanted = Some("a surface is wanted, a buffer was given");
    check([surface(true), surface(false)], [of(one, &size), of(buffer, &size)], wanted);
    let wanted = Some("a buffer is wanted, a surface was given");
    check([surface(true), view], [of(one, &size), of(other, &[0, 0, 4])], wanted);
}

#[test]
fn blocks_of_any_size_are_packed() {
    for count in [1u32, 63, 64, 65, 512] {
        let kinds = (0..count).map(|_| ParameterKind::Scalar { bytes: 8, range: None });
        let artifact = artifact(kinds.collect(), false);
        let arguments = (0..count).map(|index| QueueArgument::Scalar(u64::from(index).into()));
        let packed = Arguments::new(&artifact, arguments).unwrap();
        assert!((0..).zip(packed.words()).all(|(index, word)| index == *word), "{count}");
        assert_eq!(packed.words().len(), count as usize);
    }
}

#[test]
fn what_moves_gets_its_address_and_its_tensor_map() {
    let view = |align| ParameterKind::View {
        extents: vec![Extent::Any; 2],
        element: Element::F16,
        align,
        writes: false,
    };
    let kinds = vec![view(16), ParameterKind::Scalar { bytes: 4, range: Some((0, 9)) }, view(16), view(2)];
    let tile = |parameter| Tile {
        parameter,
        shape: [8, 8],
        swizzle: Swizzle::None,
        element: Element::F16,
        writes: false,
    };
    let tiles = vec![tile(2), tile(0)];
    let parameters = (0..).zip(kinds).map(|(index, kind)| Parameter { name: format!("p{index}"), kind });
    let signature = Signature {
        parameters: parameters.collect(),
        tiles,
        ..self::artifact(vec![], false).signature().clone()
    };
    // SAFETY: it is never run.
    #[allow(unsafe_code)]
    let artifact = unsafe { Artifact::new([], signature) }.unwrap();
    let memory = memory(0x1000, 0x1000);
    let place = QueueArgument::View(memory.region(), Extents::packed(&[4, 8]).unwrap());
    let given = [place, QueueArgument::Scalar(5u32.into()), place, place];
    let packed = Arguments::new(&artifact, given).unwrap();
    let mut packed = packed.with_maps(&artifact, |_| Ok([7; 16])).unwrap().unwrap();
    let before = packed.words().to_vec();
    let mut check = |changes: &[(usize, Other)], maps: &[u64], wanted: Result<&[(usize, u64)], &str>| {
        let mut encoded = Vec::new();
        let other = |at| changes.iter().find(|(index, _)| *index == at).map(|(_, other)| *other);
        // SAFETY: nobody reaches it.
        #[allow(unsafe_code)]
        let updated = unsafe {
            packed.update(&artifact, other, |tensor| {
                encoded.push(tensor.address());
                Ok([tensor.address(); 16])
            })
        };
        let said = updated.err().map(|error| error.to_string());
        match wanted {
            Err(wanted) => return assert!(said.as_deref().unwrap_or_default().contains(wanted), "{said:?}"),
            Ok(_) => assert_eq!(said, None),
        }
        assert_eq!(encoded, maps);
        let changed =
            before.iter().zip(packed.words()).enumerate().filter(|(_, (before, now))| before != now);
        // One word of each map stands for all.
        let changed = changed.map(|(at, (_, now))| (at, *now)).filter(|(at, _)| *at >= 32 || at % 16 == 0);
        assert_eq!(changed.collect::<Vec<_>>(), wanted.unwrap_or_default());
    };
    let (at, number) = (Other::Address, |number: u32| Other::Number(number.into()));
    check(&[], &[], Ok(&[]));
    check(&[(0, at(0x1000)), (1, number(5))], &[], Ok(&[]));
    check(&[(3, at(0x2002))], &[], Ok(&[(41, 0x2002)]));
    check(
        &[(0, at(0x3000)), (1, number(6))],
        &[0x3000],
        Ok(&[(16, 0x3000), (32, 0x3000), (36, 6), (41, 0x2002)]),
    );
    let all = [(0, at(0x4000)), (2, at(0x5000)), (3, at(0x1000)), (1, number(5))];
    check(&all, &[0x5000, 0x4000], Ok(&[(0, 0x5000), (16, 0x4000), (32, 0x4000), (37, 0x5000)]));
    check(&[(0, at(0x3008))], &[], Err("address 0x3008 is not aligned to 16"));
    check(&[(1, number(10))], &[], Err("10 is not in 0..=9"));
    check(&[(1, at(0x1000))], &[], Err("it is of another kind"));
}
