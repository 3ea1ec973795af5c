//! Tests of what is known of a number, by snippets.

use super::{Access, Fact, Loop, Ranges};
use std::fmt::Write;
use vm_ir::module::ParamKind;
use vm_ir::op::{Opcode, Shape};
use vm_ir::{Kernel, Trust, ValidModule, text, validate};

/// A block of 64 threads. `@q` has rows of a multiple of 12, `@m` of 48; `%few` is from 0 to 100.
fn module(body: &str) -> ValidModule {
    let text = format!(
        "vir 1\nkernel @k(@x: view<f32, [?], readwrite>, @q: view<f32, [?, ?*12], readwrite>, \
         @m: view<f32, [5, 48], readwrite>, %f: f32, %i: i64, %j: i32, %few: i32 in [0, 100], \
         %near: i64 in [-8, 8], @a: view<f32, [rows, inner], read>, @c: view<f32, [inner, ?], read>) at 0x0 block(64) {{\nshared @s: f32[40]\n%n = extent @x, 0 : i64\n%w = extent @q, 1 : i64\n\
         %0 = const 0 : i64\n%1 = const 1 : i64\n%4 = const 4 : i64\n%t = thread_id.x : i32\n%b = lt.s %j, %few : bool\n{body}\n}}"
    );
    validate(text::parse(&text).unwrap_or_else(|error| panic!("{text}: {error}")), Trust::Guest)
        .unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// `low..=high`, ` /` what divides it, ` <=` the extents that it is no greater than, with offsets.
fn show(kernel: &Kernel, fact: &Fact) -> String {
    let mut text = format!("{}..={}", fact.low, fact.high);
    if (1..64).contains(&fact.shift) {
        let _ = write!(text, " /{}", 1u64 << fact.shift);
    }
    for below in &fact.below {
        let param = &kernel.params()[usize::from(below.view)];
        assert!(matches!(param.kind, ParamKind::View(_)));
        let _ = write!(text, " <={}.{}{:+}", param.name, below.dimension, below.offset);
    }
    text
}

/// What is known of the operand of the snippet's `bitreverse`.
#[track_caller]
fn check(body: &str, expect: &str) {
    let module = module(body);
    let kernel = &module.kernels()[0];
    let ranges = Ranges::keeping(kernel, true);
    let mut found = None;
    kernel.for_each_op(&mut |op| {
        if op.code == Opcode::BitReverse {
            found = ranges.operand(op, 0).map(|fact| show(kernel, fact));
        }
    });
    assert_eq!(found.as_deref(), Some(expect), "{body}");
}

/// What is known of the snippet's last access: of the indices but the last, of the lanes, the shift, and the distance from its
/// base.
#[track_caller]
fn check_access(body: &str, expect: &str) {
    let module = module(body);
    let ranges = Ranges::of(&module.kernels()[0]);
    let mut found = None;
    module.kernels()[0].for_each_op(&mut |op| found = ranges.access(op).or(found.take().as_ref()).cloned());
    let Access { outer, lanes, shift, base } = found.unwrap();
    assert_eq!(format!("{outer:?} {lanes:?} /{} {:+}", 1u64 << shift.min(63), base.1), expect, "{body}");
}

/// What is known of the snippet's first `for`.
#[track_caller]
fn check_loop(body: &str, iterations: u64, exact: Option<u64>, steps_up: bool, room: u64) {
    let module = module(body);
    let ranges = Ranges::of(&module.kernels()[0]);
    let mut found = None;
    module.kernels()[0].for_each_op(&mut |op| {
        if op.code.shape() == Shape::For && found.is_none() {
            found = ranges.loop_of(op).copied();
        }
    });
    assert_eq!(found, Some(Loop { iterations, exact, steps_up, room }), "{body}");
}

#[test]
fn by_type_and_place() {
    check("%r = bitreverse %j : i32", "-2147483648..=2147483647");
    check("%r = bitreverse %few : i32", "0..=100");
    check("%r = bitreverse %t : i32", "0..=63");
    check("%v = local_index : i32\n%r = bitreverse %v : i32", "0..=63");
    check("%v = warp_id : i32\n%r = bitreverse %v : i32", "0..=1");
    check("%v = global_id.x : i64\n%r = bitreverse %v : i64", "0..=137438953407");
    check("%r = bitreverse %n : i64", "0..=1099511627776 <=x.0+0");
    check("%r = bitreverse %w : i64", "0..=1099511627776 /4 <=q.1+0");
    check("%v = extent @m, 1 : i64\n%r = bitreverse %v : i64", "48..=48 /16");
}

#[test]
fn what_wraps_has_no_interval() {
    let most = "%most = const 2147483647 : i32\n";
    check("%v = add %few, %few : i32\n%r = bitreverse %v : i32", "0..=200");
    check(&format!("{most}%v = add %few, %most : i32\n%r = bitreverse %v : i32"), "-2147483648..=2147483647");
    check(&format!("{most}%v = sub %most, %j : i32\n%r = bitreverse %v : i32"), "-2147483648..=2147483647");
    check("%v = mul %j, %j : i32\n%r = bitreverse %v : i32", "-2147483648..=2147483647");
    check("%v = add %i, %1 : i64\n%r = bitreverse %v : i64", "-9223372036854775808..=9223372036854775807");
    // Nor is it below an extent: the narrower sum may have wrapped.
    let narrow = "%c = lt.s %i, %n : bool\nif %c {\n%v = trunc %i : i32\n%r = bitreverse %v : i32\n}";
    check(narrow, "-2147483648..=2147483647");
    check("%v = trunc %n : i32\n%r = bitreverse %v : i32", "-2147483648..=2147483647");
    // A power of two that divides it outlasts that.
    let most = "%most = const 2147483644 : i32\n%four = const 4 : i32\n%v = mul %few, %four : i32\n";
    check(
        &format!("{most}%u = add %v, %most : i32\n%r = bitreverse %u : i32"),
        "-2147483648..=2147483644 /4",
    );
    // What is learnt of a sum that may wrap says nothing of its parts.
    let sum = "%s = add %i, %4 : i64\n%c = lt.s %s, %n : bool\nif %c {\n%r = bitreverse %i : i64\n}";
    check(sum, "-9223372036854775808..=9223372036854775807");
}

#[test]
fn signed_and_unsigned() {
    check("%v = sext %j : i64\n%r = bitreverse %v : i64", "-2147483648..=2147483647");
    check("%v = zext %j : i64\n%r = bitreverse %v : i64", "0..=4294967295");
    check("%v = zext %few : i64\n%r = bitreverse %v : i64", "0..=100");
    check("%v = zext %b : i64\n%r = bitreverse %v : i64", "0..=1");
    let under = |compare: &str| format!("%c = {compare} : bool\nif %c {{\n%r = bitreverse %i : i64\n}}");
    check(&under("lt.s %i, %n"), "-9223372036854775808..=1099511627775 <=x.0-1");
    check(&under("lt.u %i, %n"), "0..=1099511627775 <=x.0-1");
    check(&under("le.u %i, %n"), "0..=1099511627776 <=x.0+0");
    check(&under("gt.u %n, %i"), "0..=1099511627775 <=x.0-1");
    // As unsigned, a negative bound is a huge one.
    check(&under("lt.u %i, %near"), "-9223372036854775808..=9223372036854775807");
    check(&under("eq %i, %near"), "-8..=8");
    check(&under("ne %i, %near"), "-9223372036854775808..=9223372036854775807");
    check(
        "%c = ge.s %i, %n : bool\nif %c {\n} else {\n%r = bitreverse %i : i64\n}",
        "-9223372036854775808..=1099511627775 <=x.0-1",
    );
    let unsigned = "%v = min.u %i, %4 : i64\n%r = bitreverse %v : i64";
    check(unsigned, "-9223372036854775808..=9223372036854775807");
    check("%v = min.s %i, %4 : i64\n%r = bitreverse %v : i64", "-9223372036854775808..=4");
    check("%seven = const 7 : i32\n%v = rem.u %j, %seven : i32\n%r = bitreverse %v : i32", "0..=6");
    let signed = "%seven = const 7 : i32\n%v = rem.s %j, %seven : i32\n%r = bitreverse %v : i32";
    check(signed, "-2147483648..=2147483647");
    check("%three = const 3 : i32\n%v = div.s %few, %three : i32\n%r = bitreverse %v : i32", "0..=33");
    // By what may be zero, the remainder is the number itself.
    check("%v = rem.s %t, %few : i32\n%r = bitreverse %v : i32", "-2147483648..=2147483647");
}

#[test]
fn shifts_and_masks() {
    let by = |op: &str, value: &str, by: u32| {
        format!("%by = const {by} : i32\n%v = {op} %{value}, %by : i32\n%r = bitreverse %v : i32")
    };
    check(&by("shl", "few", 2), "0..=400 /4");
    check(&by("shl", "few", 31), "-2147483648..=0 /2147483648");
    // Counts are taken modulo the width; nothing is made of those.
    check(&by("shl", "few", 32), "-2147483648..=2147483647");
    check(&by("shr.s", "few", 1), "0..=50");
    check(&by("shr.u", "j", 1), "0..=2147483647");
    check(&by("shr.u", "j", 0), "-2147483648..=2147483647");
    check(&by("shr.s", "j", 1), "-2147483648..=2147483647");
    check(&by("and", "j", 63), "0..=63");
    check("%mask = const -4 : i32\n%v = and %few, %mask : i32\n%r = bitreverse %v : i32", "0..=100 /4");
    check(
        "%mask = const -4 : i32\n%v = and %j, %mask : i32\n%r = bitreverse %v : i32",
        "-2147483648..=2147483647",
    );
    check("%v = clz %j : i32\n%r = bitreverse %v : i32", "0..=32");
}

#[test]
fn distances_from_extents() {
    let inside = |body: &str| format!("%c = lt.u %i, %n : bool\nif %c {{\n{body}\n}}");
    check(&inside("%v = add %i, %4 : i64\n%r = bitreverse %v : i64"), "4..=1099511627779 <=x.0+3");
    check(&inside("%v = sub %i, %4 : i64\n%r = bitreverse %v : i64"), "-4..=1099511627771 <=x.0-5");
    check(&inside("%v = add %i, %near : i64\n%r = bitreverse %v : i64"), "-8..=1099511627783 <=x.0+7");
    check(&inside("%v = sub %near, %i : i64\n%r = bitreverse %v : i64"), "-1099511627783..=8");
    check(&inside("%v = mul %i, %4 : i64\n%r = bitreverse %v : i64"), "0..=4398046511100 /4");
    check(&inside("%v = div.u %i, %4 : i64\n%r = bitreverse %v : i64"), "0..=274877906943 <=x.0-1");
    // What stands behind is known no longer.
    check(&format!("{}\n%r = bitreverse %i : i64", inside("")), "-9223372036854775808..=9223372036854775807");
    // Both sides of a selection.
    check(&inside("%v = select %b, %i, %n : i64\n%r = bitreverse %v : i64"), "0..=1099511627776 <=x.0+0");
    // A multiple of four that is below an extent of a multiple of twelve is four below.
    check(
        "%v = sext %t : i64\n%u = mul %v, %4 : i64\n%c = lt.s %u, %w : bool\nif %c {\n%r = bitreverse %u : i64\n}",
        "0..=252 /4 <=q.1-4",
    );
    // Of a view whose extent is not known to be one, it is not.
    check(
        "%v = sext %t : i64\n%u = mul %v, %4 : i64\n%c = lt.s %u, %n : bool\nif %c {\n%r = bitreverse %u : i64\n}",
        "0..=252 /4 <=x.0-1",
    );
}

#[test]
fn counts() {
    let around = |low: &str, high: &str, step: &str| {
        format!("for %c: i64 = %{low} to %{high} step %{step} {{\n%r = bitreverse %c : i64\n}}")
    };
    check(&around("0", "n", "1"), "0..=1099511627775 <=x.0-1");
    check(&around("0", "w", "4"), "0..=1099511627772 /4 <=q.1-4");
    check(&around("near", "n", "4"), "-8..=1099511627775 <=x.0-1");
    check(
        &format!("%ten = const 10 : i64\n%three = const 3 : i64\n{}", around("0", "ten", "three")),
        "0..=9",
    );
    let most = i64::MAX as u64;
    check_loop(&around("0", "n", "1"), 1 << 40, None, true, most - (1 << 40));
    check_loop(&around("0", "i", "1"), most, None, true, 0);
    // No step, or one down: it may not run at all, and no more often than in steps of 1.
    check_loop(&around("0", "n", "near"), 1 << 40, None, false, (most - (1 << 40)) / 8);
    let fixed = |high: i64, step: i64| {
        format!("%h = const {high} : i64\n%s = const {step} : i64\n{}", around("0", "h", "s"))
    };
    check_loop(&fixed(10, 3), 4, Some(4), true, (most - 10) / 3);
    check_loop(&fixed(9, 3), 3, Some(3), true, (most - 9) / 3);
    check_loop(&fixed(10, 0), 0, Some(0), false, most - 10);
    check_loop(&fixed(10, -1), 0, Some(0), false, most - 10);
    check_loop(&fixed(-1, 1), 0, Some(0), true, most + 1);
    // To the last number there is, in steps that go beyond.
    check_loop(&fixed(i64::MAX, i64::MAX - 1), 2, Some(2), true, 0);
}

#[test]
fn carried() {
    // What it begins with, or what the body yields: multiples of four from 0 on.
    let carried = |first: &str, body: &str| {
        format!(
            "%e = for %c: i64 = %0 to %w step %4 carry(%v: i64 = %{first}) {{\n{body}\nyield %y\n}}\n%r = bitreverse %e : i64"
        )
    };
    check(&carried("0", "%y = add %c, %4 : i64"), "0..=1099511627776 /4");
    check(&carried("0", "%y = add %c, %1 : i64"), "0..=1099511627773");
    check(&carried("1", "%y = add %c, %4 : i64"), "1..=1099511627776");
    // In the body nothing is known of it.
    check(&carried("0", "%y = add %v, %4 : i64"), "-9223372036854775808..=9223372036854775807");
}

#[test]
fn accesses() {
    check_access("%a = load @x[%i] : f32", "[] Together /1 +0");
    check_access("%a = load @s[%t] : f32", "[] Together /1 +0");
    check_access("%c = lt.u %i, %n : bool\nif %c {\n%a = load @x[%i] : f32\n}", "[] All /1 +0");
    check_access("%c = le.u %i, %n : bool\nif %c {\n%a = load @x[%i] : f32\n}", "[] Together /1 +0");
    check_access("%c = lt.s %i, %n : bool\nif %c {\n%a = load @x[%i] : f32\n}", "[] Together /1 +0");
    // The last four, and one less.
    let ahead = |by: i64, lanes: u32| {
        format!(
            "%by = const {by} : i64\n%v = zext %t : i64\n%u = add %v, %by : i64\n%c = lt.s %u, %n : bool\nif %c {{\n\
             %a = load @x[%v] : vec{lanes}<f32>\n}}"
        )
    };
    check_access(&ahead(3, 4), "[] All /1 +0");
    check_access(&ahead(2, 4), "[] Each /1 +0");
    // Fixed extents: thread numbers are below 48 or not.
    check_access("%a = load @m[%few, %t] : f32", "[false] Together /1 +0");
    let half = "%one = const 1 : i32\n%half = shr.u %t, %one : i32\n";
    check_access(&format!("{half}%a = load @m[%0, %half] : f32"), "[true] All /1 +0");
    check_access(&format!("{half}%a = load @s[%half] : f32"), "[] All /1 +0");
    let far = "%far = const 16 : i32\n%v = add %half, %far : i32\n";
    check_access(&format!("{half}{far}%a = load @m[%4, %v] : f32"), "[true] All /1 +16");
    check_access(&format!("{half}{far}%a = load @s[%v] : f32"), "[] Together /1 +16");
    check_access(&format!("{half}{far}%a = load @m[%4, %v] : vec2<f32>"), "[true] Each /1 +16");
    // Four in a row at a multiple of four: all or none, where the extent is one as well.
    let fours = "%i4 = mul %i, %4 : i64\n";
    check_access(&format!("{fours}%a = load @q[%0, %i4] : vec4<f32>"), "[false] Together /4 +0");
    check_access(&format!("{fours}%a = load @x[%i4] : vec4<f32>"), "[] Each /4 +0");
    check_access(&format!("{fours}%a = load @q[%0, %i4] : vec8<f32>"), "[false] Each /4 +0");
    // What is below an extent is below all of its name.
    let named = |of: &str, index: &str| {
        format!("%k = extent {of} : i64\n%c = lt.u %i, %k : bool\nif %c {{\n%a = load {index} : f32\n}}")
    };
    check_access(&named("@a, 1", "@c[%i, %j]"), "[true] Together /1 +0");
    check_access(&named("@c, 0", "@a[%0, %i]"), "[false] All /1 +0");
    check_access(&named("@c, 0", "@c[%0, %i]"), "[false] Together /1 +0");
    check_access(&named("@a, 0", "@c[%i, %j]"), "[false] Together /1 +0");
    // A sum that may wrap is no distance.
    check_access("%v = add %j, %few : i32\n%a = load @x[%v] : f32", "[] Together /1 +0");
    check_access("%v = add %i, %4 : i64\n%a = load @x[%v] : f32", "[] Together /1 +0");
}

/// What a loop's condition computed can't be used in its body, so no access there is known by it.
#[test]
fn a_base_is_visible() {
    let sum = |n: u32| {
        format!("%p{n} = mul %t, %t : i32\n%one{n} = const 1 : i32\n%q{n} = add %p{n}, %one{n} : i32")
    };
    let (above, below) = (sum(0), sum(1));
    let body = format!(
        "%e = while carry(%k: i64 = %0) {{\n{above}\n%c = lt.s %k, %n : bool\nyield %c\n}} do {{\n{below}\n\
         %a = load @x[%q1] : f32\n%g = add %k, %1 : i64\nyield %g\n}}"
    );
    let module = module(&body);
    let ranges = Ranges::of(&module.kernels()[0]);
    let kernel = &module.kernels()[0];
    kernel.for_each_op(&mut |op| {
        if let Some(access) = ranges.access(op) {
            assert_eq!(kernel.value_name(access.base.0), "%p1");
            assert_eq!(access.base.1, 1);
        }
    });
}
