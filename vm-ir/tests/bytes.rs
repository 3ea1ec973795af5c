//! What the decoder refuses, byte by byte.

use vm_ir::binary::{DecodeErrorKind as Kind, Lines, decode, encode};
use vm_ir::{Module, text};

fn sample() -> Module {
    let source =
        "vir 1\nkernel @k(@x: view<f32, [?*4, 7], read, align 16>, %n: i32 in [-5, 9]) at 0x1000 block(32) {
  shared @s: i8[3, 4]
  %0 = add %n, %n : i32
}\n";
    text::parse(source).unwrap()
}

#[test]
fn round_trip_with_and_without_lines() {
    let module = sample();
    for lines in [Lines::Keep, Lines::Strip] {
        let bytes = encode(&module, lines);
        let back = decode(&bytes).unwrap();
        assert_eq!(back, module);
        assert_eq!(encode(&back, lines), bytes);
        let line = back.kernels()[0].body().ops[0].line.0;
        assert_eq!(line, if lines == Lines::Keep { 4 } else { 0 });
    }
}

/// Local arrays are flagged, and flagged only where some kernel has one.
#[test]
fn local_arrays() {
    let source = "vir 1\nkernel @k() at 0x0 block(32) {\n  local @a: i8[5]\n  store @a[0], 1\n}\n";
    let module = text::parse(source).unwrap();
    assert_eq!(module.kernels()[0].local_bytes(), 16);
    assert_eq!(text::parse(&text::print(&module)).unwrap(), module);
    for lines in [Lines::Keep, Lines::Strip] {
        let bytes = encode(&module, lines);
        assert_eq!(bytes[6] & !1, 32);
        assert_eq!(decode(&bytes).unwrap(), module);
    }
    let mut bytes = encode(&module, Lines::Strip);
    // Without the flag the array's count is that of the body's values.
    bytes[6] = 0;
    assert!(decode(&bytes).is_err());
    let none = text::parse("vir 1\nkernel @k() at 0x0 block(32) {\n}\n").unwrap();
    let mut bytes = encode(&none, Lines::Strip);
    assert_eq!(bytes[6], 0);
    bytes[6] = 32;
    // No arrays, in front of the body.
    bytes.insert(bytes.len() - 3, 0);
    assert_eq!(decode(&bytes).unwrap_err().kind, Kind::Flags(32));
}

/// Resident blocks are flagged, and flagged only where some kernel asks for them.
#[test]
fn resident_blocks() {
    let module = text::parse("vir 1\nkernel @k() at 0x0 block(32) cluster(2) resident(3) {\n}\n").unwrap();
    assert_eq!(module.kernels()[0].resident(), 3);
    assert_eq!(text::parse(&text::print(&module)).unwrap(), module);
    let mut bytes = encode(&module, Lines::Strip);
    assert_eq!(bytes[6], 2 | 16);
    assert_eq!(decode(&bytes).unwrap(), module);
    let at = bytes.iter().rposition(|byte| *byte == 3).unwrap();
    bytes[at] = 0;
    assert_eq!(decode(&bytes).unwrap_err().kind, Kind::Flags(18));
}

/// Extents with names are flagged, and flagged only then; modules without are what they were before there were names.
#[test]
fn names_of_extents() {
    let named = text::parse(
        "vir 1\nkernel @k(@x: view<f32, [m, k*4], read>, @y: view<f32, [k*4, 9], write>) at 0x0 block(1) {\n}\n",
    );
    let named = named.unwrap();
    let bytes = encode(&named, Lines::Strip);
    assert_eq!(bytes[6..8], [8, 0]);
    assert_eq!(decode(&bytes).as_ref(), Ok(&named));
    assert_eq!(text::parse(&text::print(&named)).as_ref(), Ok(&named));
    let kernel = &named.kernels()[0];
    let same = [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(view, dimension)| kernel.same_extent(view, dimension));
    assert_eq!(same, [(0, 0), (0, 1), (0, 1), (1, 1)]);
    let mut unflagged = bytes.clone();
    unflagged[6] = 0;
    assert_eq!(decode(&unflagged).unwrap_err().kind, Kind::Flags(0));
    for length in 0..bytes.len() {
        assert!(decode(&bytes[..length]).is_err(), "{length} bytes of {}", bytes.len());
    }
    let plain =
        text::parse("vir 1\nkernel @k(@x: view<f32, [?, ?*4], read>) at 0x0 block(1) {\n}\n").unwrap();
    assert_eq!(encode(&plain, Lines::Strip)[6..8], [0, 0]);
}

#[test]
fn every_truncation_is_refused() {
    let bytes = encode(&sample(), Lines::Keep);
    for length in 0..bytes.len() {
        assert!(decode(&bytes[..length]).is_err(), "{length} bytes of {}", bytes.len());
    }
    let mut more = bytes.clone();
    more.push(0);
    assert_eq!(decode(&more).unwrap_err().kind, Kind::Trailing(1));
}

#[test]
fn refusals() {
    let good = encode(&Module::new(Vec::new()), Lines::Strip);
    assert_eq!(good, b"\0vir\x01\0\0\0\0");
    let check = |at: usize, replace: &[u8], kind: Kind| {
        let mut bytes = good.clone();
        bytes.splice(at..at + 1, replace.iter().copied());
        assert_eq!(decode(&bytes).unwrap_err().kind, kind, "{replace:?} at {at}");
    };
    check(6, &[8], Kind::Flags(8));
    check(0, b"\x7f", Kind::Magic);
    check(4, &[2], Kind::Version(2));
    check(6, &[2], Kind::Flags(2));
    check(6, &[16], Kind::Flags(16));
    check(8, &[0x80, 0], Kind::Number("number of 64 bits"));
    check(8, &[0xff; 10], Kind::Number("number of 64 bits"));
    check(8, &[0xff, 0xff, 0x7f], Kind::TooMany { what: "kernels", found: 0x1f_ffff, limit: 256 });
    check(8, &[9], Kind::Truncated);
    check(8, &[1, 0], Kind::Name);
    check(8, &[1, 1, b'9'], Kind::Name);
    check(8, &[1, 2, 0xc3, 0xa4], Kind::Name);
    check(8, &[1, 65], Kind::TooMany { what: "bytes in a name", found: 65, limit: 64 });
}
