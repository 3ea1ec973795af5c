//! What kernels print: formats as the C library has them, records in a ring, and kernels that leave them there.

mod common;

use Given::{F, I, L};
use common::{Machine, Program, Random};
use vm_ptx::print::{MAX_ARGUMENTS, Record, format, records};

/// An argument: an int, a long or a double.
#[derive(Clone, Copy)]
enum Given {
    I(i32),
    L(i64),
    F(f64),
}

/// Arguments as a call of `vprintf` finds them.
fn block(given: &[Given]) -> Vec<u8> {
    let mut block = Vec::new();
    for given in given {
        let bytes = match given {
            I(value) => value.to_le_bytes().to_vec(),
            L(value) => value.to_le_bytes().to_vec(),
            F(value) => value.to_bits().to_le_bytes().to_vec(),
        };
        block.resize(block.len().next_multiple_of(bytes.len()), 0);
        block.extend(bytes);
    }
    block
}

/// With what glibc 2.36 prints.
const FORMATS: &[(&str, &[Given], &str)] = &[
    ("%d", &[I(0)], "0"),
    ("%i|%d", &[I(-2147483648), I(7)], "-2147483648|7"),
    ("%5d|%-5d|%05d|%+d|% d", &[I(42), I(42), I(42), I(42), I(42)], "   42|42   |00042|+42| 42"),
    ("%.3d|%8.3d|%-8.3d|%08.3d|%.0d", &[I(5), I(-5), I(5), I(5), I(0)], "005|    -005|005     |     005|"),
    (
        "%u %o %#o %x %X %#x %#X",
        &[I(-1), I(8), I(8), I(255), I(255), I(255), I(0)],
        "4294967295 10 010 ff FF 0xff 0",
    ),
    ("%hhd %hd %hhu %hu", &[I(300), I(70000), I(-1), I(-1)], "44 4464 255 65535"),
    (
        "%ld %lld %lu %llx %zu",
        &[L(-1099511627776), L(4611686018427387904), L(-1), L(244837814094590), L(99)],
        "-1099511627776 4611686018427387904 18446744073709551615 deadbeefcafe 99",
    ),
    ("%d %ld %d", &[I(1), L(2), I(3)], "1 2 3"),
    ("%c%c%-3c|%3c", &[I(65), I(66), I(67), I(68)], "ABC  |  D"),
    (
        "%f %F %.0f %#.0f %.3f %10.2f|%-10.2f|%010.2f|%+.1f",
        &[
            F(1.5),
            F(2.25),
            F(2.5),
            F(2.0),
            F(0.3333333333333333),
            F(-3.14259),
            F(3.14259),
            F(-3.14259),
            F(2.0),
        ],
        "1.500000 2.250000 2 2. 0.333      -3.14|3.14      |-000003.14|+2.0",
    ),
    (
        "%e %E %.0e %#.0e %.10e %12.1e",
        &[F(12345.678), F(1e-300), F(5.5), F(5.0), F(0.3333333333333333), F(0.0)],
        "1.234568e+04 1.000000E-300 6e+00 5.e+00 3.3333333333e-01      0.0e+00",
    ),
    (
        "%g %g %g %g %g %G %#g %.3g %.0g",
        &[F(100000.0), F(1000000.0), F(0.0001), F(1e-05), F(0.0), F(1e+20), F(1.0), F(123456.0), F(15.0)],
        "100000 1e+06 0.0001 1e-05 0 1E+20 1.00000 1.23e+05 2e+01",
    ),
    (
        "%a %a %a %.2a %.0a %A %a",
        &[F(1.0), F(-0.1), F(0.0), F(1.999), F(1.5), F(255.5), F(5e-324)],
        "0x1p+0 -0x1.999999999999ap-4 0x0p+0 0x2.00p+0 0x2p+0 0X1.FFP+7 0x0.0000000000001p-1022",
    ),
    (
        "%f %F %e %5g|%05f|%-5a|",
        &[F(f64::INFINITY), F(-f64::INFINITY), F(f64::NAN), F(f64::INFINITY), F(f64::INFINITY), F(f64::NAN)],
        "inf -INF nan   inf|  inf|nan  |",
    ),
    (
        "%*d|%-*d|%.*f|%*.*f|%*d",
        &[I(6), I(1), I(4), I(2), I(2), F(1.2345), I(8), I(1), F(9.99), I(-5), I(3)],
        "     1|2   |1.23|    10.0|3    ",
    ),
    ("%p %p", &[L(0), L(32512)], "(nil) 0x7f00"),
    ("100%% %d%%", &[I(5)], "100% 5%"),
    ("%.15g %.17g %.20f", &[F(0.1), F(0.1), F(0.1)], "0.1 0.10000000000000001 0.10000000000000000555"),
    ("%g %g", &[F(9.9999995), F(999999.5)], "10 1e+06"),
    ("%.1f %.1f %.0f %.2e", &[F(0.25), F(0.35), F(0.5), F(1.125)], "0.2 0.3 0 1.12e+00"),
    ("%.3a|%.13a|%.15a", &[F(1.0), F(1.1), F(1.1)], "0x1.000p+0|0x1.199999999999ap+0|0x1.199999999999a00p+0"),
    ("% 05d|%-+5d|%+ d", &[I(3), I(3), I(3)], " 0003|+3   |+3"),
];

#[test]
fn formats_are_those_of_c() {
    for (text, given, wanted) in FORMATS {
        let found = format(text.as_bytes(), &block(given), 10_000, |_| None);
        assert_eq!(String::from_utf8_lossy(&found), *wanted, "{text}");
    }
}

#[test]
fn strings_are_those_at_their_addresses() {
    let string = |at| (at == 64).then(|| b"text".to_vec());
    let said = |text: &str, given: &[Given]| {
        String::from_utf8(format(text.as_bytes(), &block(given), 100, string)).unwrap()
    };
    assert_eq!(
        said("%s|%6s|%-6s|%.2s|%5.1s", &[L(64), L(64), L(64), L(64), L(64)]),
        "text|  text|text  |te|    t"
    );
    assert_eq!(said("%s %s", &[L(0), L(-1)]), "(null) (null)");
    assert_eq!(said("%d %*s", &[I(3), I(6), L(64)]), "3   text");
}

#[test]
fn formats_that_are_none_do_no_harm() {
    let said = |text: &[u8]| String::from_utf8(format(text, &[1; 8], 5000, |_| None)).unwrap();
    assert_eq!(said(b"%"), "%");
    assert_eq!(said(b"%n%k%-0"), "%n%k%-0");
    assert_eq!(said(b"a\0%d"), "a");
    assert_eq!(said(b"%99999999999999999999d").len(), 1024);
    assert_eq!(said(b"%.99999999999999999999d").len(), 1024);
    assert_eq!(said(b"%d %d %d").split_once(' ').unwrap().1, "16843009 0");
    assert_eq!(said(&b"%1000d".repeat(100)).len(), 5000, "no longer than asked for");
    let mut random = Random::new(3);
    for _ in 0..20_000 {
        let letters = b"%%%%.*-+ #0123456789lhzdiouxXcsfeEgGaAp\0k";
        let text: Vec<u8> =
            (0..random.below(12)).map(|_| letters[random.below(letters.len() as u64) as usize]).collect();
        let given: Vec<u8> = (0..random.below(40)).map(|_| random.next() as u8).collect();
        assert!(format(&text, &given, 3000, |_| Some(vec![b'x'; 9000])).len() <= 3000);
    }
}

/// Puts records into a ring, as kernels do.
fn put(count: &mut u64, ring: &mut [u8], record: &Record) {
    let words = 2 + record.arguments.len() as u64 / 8;
    let mut all = vec![*count >> 3 << 16 | words, record.format];
    all.extend(record.arguments.chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())));
    for word in all {
        let at = (*count % ring.len() as u64) as usize;
        ring[at..at + 8].copy_from_slice(&word.to_le_bytes());
        *count = count.wrapping_add(8);
    }
}

#[test]
fn a_ring_keeps_the_newest_records() {
    let record =
        |number: u64| Record { format: number, arguments: vec![number as u8; 8 * (number % 5) as usize] };
    for (length, kept) in [(0, 0), (1, 1), (100, 30), (3000, 30)] {
        let (mut count, mut ring) = (0, vec![0; 1024]);
        (0..length).for_each(|number| put(&mut count, &mut ring, &record(number)));
        let found: Vec<_> = records(count, &ring).collect();
        assert!(found.len() >= kept, "{} of {length}", found.len());
        let first = length - found.len() as u64;
        assert_eq!(found, (first..length).map(record).collect::<Vec<_>>());
    }
}

#[test]
fn a_ring_of_anything_does_no_harm() {
    let mut random = Random::new(5);
    for _ in 0..300 {
        let mut ring: Vec<u8> = (0..512).map(|_| random.next() as u8).collect();
        let mut count = (random.next() >> random.below(64)) & 0xffff_ffff_ffff_fff8;
        put(&mut count, &mut ring, &Record { format: 1, arguments: vec![] });
        // A head that lies about its length.
        ring[random.below(64) as usize * 8] = random.next() as u8;
        for record in records(count.wrapping_mul(random.below(3)), &ring) {
            assert!(record.arguments.len() as u64 <= MAX_ARGUMENTS);
        }
    }
    assert_eq!(records(u64::MAX, &[]).count(), 0);
    assert_eq!(records(64, &[0; 24]).count(), 0);
}

/// The text of a kernel that prints once per thread that a line of PTX lets through, with these arguments.
fn printing(guard: &str, format: &str, arguments: &str) -> String {
    let bytes: Vec<String> = format.bytes().chain([0]).map(|byte| byte.to_string()).collect();
    format!(
        ".version 8.0\n.target sm_75\n.address_size 64\n.extern .func (.param .b32 r) vprintf(.param .b64 a, .param .b64 b);\n         .global .align 1 .b8 text[{}] = {{{}}};\n         .visible .entry k(.param .u64 out) {{\n.reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<3>; .reg .f64 %d<3>; .local .align 8 .b8 depot[32];\n         mov.u64 %rd1, depot; cvta.local.u64 %rd2, %rd1; mov.u32 %r1, %tid.x; mov.u64 %rd3, text; cvta.global.u64 %rd4, %rd3;\n         cvt.rn.f64.u32 %d1, %r1;\n{arguments}\n{guard}\n         {{ .param .b64 p0; st.param.b64 [p0], %rd4; .param .b64 p1; st.param.b64 [p1], %rd2; .param .b32 r0;\n         call.uni (r0), vprintf, (p0, p1); ld.param.b32 %r5, [r0]; }}\n         ld.param.u64 %rd5, [out]; mul.wide.u32 %rd6, %r1, 4; add.s64 %rd5, %rd5, %rd6; st.global.u32 [%rd5], %r5;\nskip: ret;\n}}\n",
        bytes.len(),
        bytes.join(",")
    )
}

#[test]
fn kernels_leave_what_they_print() {
    const GIVEN: &str = "st.local.u32 [%rd1], %r1; st.local.f64 [%rd1+8], %d1;";
    let odd = "and.b32 %r2, %r1, 1; setp.eq.u32 %p1, %r2, 0;\n@%p1 bra skip;";
    let all: Vec<u32> = (0..64).collect();
    let cases: &[(&str, Vec<u32>)] =
        &[("", all.clone()), (odd, all.into_iter().filter(|i| i % 2 == 1).collect())];
    for (guard, threads) in cases {
        for machine in Machine::all() {
            let text = printing(guard, "%d: %.1f", GIVEN);
            let mut program = Program::on(&text, machine);
            let out = program.put(&[0u32; 64]);
            program.launch("k", [1, 1, 1], [64, 1, 1], &[out.into()]);
            let mut said: Vec<String> = program
                .printed
                .iter()
                .map(|record| {
                    assert_eq!(record.format, program.symbol("text"));
                    String::from_utf8(format(b"%d: %.1f", &record.arguments, 100, |_| None)).unwrap()
                })
                .collect();
            said.sort_by_key(|line| line.split(':').next().unwrap().parse::<u32>().unwrap());
            assert_eq!(
                said,
                threads.iter().map(|i| format!("{i}: {i}.0")).collect::<Vec<_>>(),
                "{machine:?}"
            );
            let wanted: Vec<u32> = (0..64).map(|i| if threads.contains(&i) { 2 } else { 0 }).collect();
            assert_eq!(program.get::<u32>(out, 64), wanted, "how many arguments");
        }
    }
}

#[test]
fn the_newest_of_what_kernels_print_is_kept() {
    for machine in Machine::all() {
        let text = printing("", "%d", "st.local.u32 [%rd1], %r1;");
        let mut program = Program::on(&text, machine);
        let out = program.put(&[0u32; 512]);
        program.launch("k", [1, 1, 1], [512, 1, 1], &[out.into()]);
        // 24 bytes of each, in 4096. Warps of a GPU write at once: one that is a lap late takes a newer record with it.
        let least = if machine == Machine::Cuda { 1 } else { 170 };
        assert!((least..=170).contains(&program.printed.len()), "{machine:?}: {}", program.printed.len());
        assert!(program.printed.iter().all(|record| record.arguments.len() == 8));
    }
}
