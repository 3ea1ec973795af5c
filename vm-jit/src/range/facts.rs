//! Tests of what is known of a number, by snippets.

use super::{Access, Fact, Loop, Ranges};
use std::fmt::Write;
use vm_ir::module::ParamKind;
use vm_ir::op::{Opcode, Shape};
use vm_ir::{Kernel, Trust, ValidModule, text, validate};

/// A block of 64 threads. `@q` has rows of a multiple of 12, `@m` of 48; `%few` is from 0 to 100.
fn module(body: &str) -> ValidModule {
    module_of("block(64)", body)
}

fn module_of(block: &str, body: &str) -> ValidModule {
    let text = format!(
        "vir 1\nkernel @k(@x: view<f32, [?], readwrite>, @q: view<f32, [?, ?*12], readwrite>, \
         @m: view<f32, [5, 48], readwrite>, %f: f32, %i: i64, %j: i32, %few: i32 in [0, 100], \
         %near: i64 in [-8, 8], @a: view<f32, [rows, inner], read>, @c: view<f32, [inner, ?], read>, \
         %down: i64 in [-3, 2], %up: i64 in [-5, 7], @d: view<i64, [?, ?, ?, ?], readwrite>, \
         @b: view<i8, [?], readwrite, align 16>, \
         @b16: view<i8, [?*16], readwrite, align 16>) at 0x0 {block} {{\n\
         shared @s: f32[40]\n%n = extent @x, 0 : i64\n%w = extent @q, 1 : i64\n\
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
    check_of("block(64)", body, expect);
}

#[track_caller]
fn check_of(block: &str, body: &str, expect: &str) {
    let module = module_of(block, body);
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

/// The facts of an `i64` and an `i32` that may have any value.
const ANY: &str = "-9223372036854775808..=9223372036854775807";
const ANY_32: &str = "-2147483648..=2147483647";

/// A snippet that shows the result of `op`.
fn of(op: &str, operands: &str, ty: &str) -> String {
    format!("%v = {op} {operands} : {ty}\n%r = bitreverse %v : {ty}")
}

/// A snippet that shows a value where the condition holds, or where it does not.
fn where_so(condition: &str, holds: bool, value: &str, ty: &str) -> String {
    let (then, or_else) = match holds {
        true => (format!("%r = bitreverse {value} : {ty}"), String::new()),
        false => (String::new(), format!("%r = bitreverse {value} : {ty}")),
    };
    format!("%c = {condition} : bool\nif %c {{\n{then}\n}} else {{\n{or_else}\n}}")
}

#[test]
fn ids_are_below_what_a_launch_may_have() {
    let id = |op: &str| format!("%v = {op} : i32\n%r = bitreverse %v : i32");
    let cases: &[(&str, &str, &str)] = &[
        ("block(64)", "block_id.x", "0..=2147483646"),
        ("block(64)", "block_id.y", "0..=65534"),
        ("block(64)", "block_id.z", "0..=65534"),
        ("block(64)", "grid_dim.x", "1..=2147483647"),
        ("block(64)", "grid_dim.y", "1..=65535"),
        ("block(64)", "grid_dim.z", "1..=65535"),
        ("block(64)", "block_dim.x", "64..=64 /64"),
        ("block(64)", "block_dim.y", "1..=1"),
        ("block(64)", "thread_id.y", "0..=0"),
        ("block(64)", "lane_id", "0..=31"),
        ("block(16)", "lane_id", "0..=15"),
        ("block(8, 4, 2)", "thread_id.x", "0..=7"),
        ("block(8, 4, 2)", "thread_id.y", "0..=3"),
        ("block(8, 4, 2)", "thread_id.z", "0..=1"),
        ("block(8, 4, 2)", "local_index", "0..=63"),
        ("block(96)", "warp_id", "0..=2"),
        ("block(64) cluster(4)", "cluster_rank", "0..=3"),
        ("block(64) cluster(4)", "cluster_id", "0..=536870910"),
    ];
    for (block, op, expect) in cases {
        check_of(block, &id(op), expect);
    }
    let global = |axis: &str| format!("%v = global_id.{axis} : i64\n%r = bitreverse %v : i64");
    check_of("block(8, 4, 2)", &global("x"), "0..=17179869175");
    check_of("block(8, 4, 2)", &global("y"), "0..=262139");
    check_of("block(8, 4, 2)", &global("z"), "0..=131069");
}

#[test]
fn both_ends_of_results() {
    check(&of("sub", "%few, %t", "i32"), "-63..=100");
    check(&of("mul", "%down, %up", "i64"), "-21..=15");
    check(
        "%a = sub %0, %down : i64\n%o = sub %0, %up : i64\n%v = mul %a, %o : i64\n%r = bitreverse %v : i64",
        "-21..=15",
    );
    check("%a = sub %0, %down : i64\n%v = mul %a, %up : i64\n%r = bitreverse %v : i64", "-15..=21");
    check("%o = sub %0, %up : i64\n%v = mul %down, %o : i64\n%r = bitreverse %v : i64", "-15..=21");
    check(&of("max.s", "%near, %4", "i64"), "4..=8");
    check(&of("min.s", "%near, %4", "i64"), "-8..=4");
    check(&of("min.u", "%t, %few", "i32"), "0..=63");
    check(&of("min.u", "%near, %4", "i64"), ANY);
    check(&of("min.u", "%4, %near", "i64"), ANY);
    check(&of("popcount", "%j", "i32"), "0..=32");
    check(&of("ctz", "%j", "i32"), "0..=32");
    check(&of("and", "%t, %few", "i32"), "0..=63");
    check(&of("and", "%few, %t", "i32"), "0..=63");
    check(&of("and", "%j, %few", "i32"), "0..=100");
    check("%u = trunc %near : i32\n%r = bitreverse %u : i32", "-8..=8");
    check("%u = trunc %w : i32\n%r = bitreverse %u : i32", "-2147483648..=2147483644 /4");
}

#[test]
fn divisions() {
    let from_100 = "%hundred = const 100 : i32\n%x = add %few, %hundred : i32\n%two = const 2 : i32\n\
                    %three = const 3 : i32\n%o = and %few, %three : i32\n%y = add %o, %two : i32\n";
    let of_100 = |op: &str, by: &str| format!("{from_100}{}", of(op, &format!("%x, {by}"), "i32"));
    check(&of_100("div.s", "%y"), "20..=100");
    check(&of_100("div.u", "%y"), "20..=100");
    check(&of_100("rem.s", "%y"), "0..=4");
    check(&of_100("shr.s", "%two"), "25..=50");
    // The divisor may be zero or negative, or the dividend negative.
    check(&of("div.s", "%t, %few", "i32"), ANY_32);
    check(&of("div.u", "%t, %few", "i32"), ANY_32);
    check(&of("div.u", "%4, %near", "i64"), ANY);
    check(&of("div.u", "%near, %4", "i64"), ANY);
    check(&of("div.s", "%near, %4", "i64"), ANY);
    check(&of("rem.u", "%j, %few", "i32"), ANY_32);
    check(&of("rem.s", "%4, %near", "i64"), ANY);
    check(&of("rem.s", "%near, %4", "i64"), ANY);
    let small = "%seven = const 7 : i32\n%far = const 1000 : i32\n";
    check(&format!("{small}{}", of("rem.s", "%few, %seven", "i32")), "0..=6");
    check(&format!("{small}{}", of("rem.s", "%few, %far", "i32")), "0..=100");
    // A quotient by a power of two keeps the rest of the powers of two; a quotient by another number keeps none.
    let sixteen = |op: &str, by: i64| {
        format!(
            "%16 = const 16 : i32\n%x = mul %few, %16 : i32\n%by = const {by} : i32\n{}",
            of(op, "%x, %by", "i32")
        )
    };
    check(&sixteen("div.s", 4), "0..=400 /4");
    check(&sixteen("div.s", 3), "0..=533");
    check(&sixteen("shr.u", 2), "0..=400 /4");
    check(&sixteen("shr.s", 5), "0..=50");
}

#[test]
fn shifts_by_their_width_are_unknown() {
    for (op, value) in [("shr.s", "few"), ("shr.u", "few"), ("shr.u", "j"), ("shl", "few")] {
        for by in [32, -1] {
            check(&format!("%by = const {by} : i32\n{}", of(op, &format!("%{value}, %by"), "i32")), ANY_32);
        }
        check(&of(op, &format!("%{value}, %few"), "i32"), ANY_32);
    }
}

#[test]
fn powers_of_two_that_divide() {
    let fours = "%four = const 4 : i32\n%x = mul %few, %four : i32\n";
    check(&format!("{fours}{}", of("add", "%x, %x", "i32")), "0..=800 /4");
    check(&format!("{fours}{}", of("sub", "%x, %four", "i32")), "-4..=396 /4");
    check(&format!("{fours}{}", of("mul", "%x, %four", "i32")), "0..=1600 /16");
    check(&format!("{fours}{}", of("min.s", "%x, %four", "i32")), "0..=4 /4");
    check(&format!("{fours}{}", of("min.s", "%x, %t", "i32")), "0..=63");
    check(&format!("{fours}{}", of("max.s", "%x, %four", "i32")), "4..=400 /4");
    // Both bounds are rounded inwards to multiples.
    let between = "%v = mul %i, %4 : i64\n%low = const -6 : i64\n%high = const 10 : i64\n%a = ge.s %v, %low : bool\n\
                   %o = lt.s %v, %high : bool\n";
    check(&format!("{between}{}", where_so("and %a, %o", true, "%v", "i64")), "-4..=8 /4");
}

#[test]
fn extents_that_results_are_below() {
    let inside = |body: &str| format!("%c = lt.u %i, %n : bool\nif %c {{\n{body}\n}}");
    let under = |body: &str| format!("%c = lt.s %i, %n : bool\nif %c {{\n{body}\n}}");
    check(&inside(&of("sub", "%i, %near", "i64")), "-8..=1099511627783 <=x.0+7");
    check(&inside(&of("shr.u", "%i, %1", "i64")), "0..=549755813887 <=x.0-1");
    check(&inside(&of("rem.u", "%i, %4", "i64")), "0..=3 <=x.0-1");
    check(&inside(&of("and", "%i, %4", "i64")), "0..=4 /4 <=x.0-1");
    check(&inside(&of("and", "%4, %i", "i64")), "0..=4 /4");
    check(&inside(&of("min.s", "%i, %near", "i64")), "-8..=8 <=x.0-1");
    check(&inside(&of("min.s", "%near, %i", "i64")), "-8..=8 <=x.0-1");
    check(&inside(&of("min.u", "%i, %4", "i64")), "0..=4 <=x.0-1");
    check(&inside(&of("min.u", "%4, %i", "i64")), "0..=4 <=x.0-1");
    check(&inside(&of("max.s", "%i, %0", "i64")), "0..=1099511627775");
    check(&inside(&of("max.s", "%i, %n", "i64")), "1..=1099511627776 <=x.0+0");
    // A negative number is below an extent, but its lower bits may exceed it.
    check(&under(&of("and", "%i, %4", "i64")), "0..=4 /4");
    check(&under(&of("shr.u", "%i, %1", "i64")), "0..=9223372036854775807");
}

#[test]
fn several_extents() {
    let extent = |name: &str, of: &str| format!("%{name} = extent {of} : i64\n");
    let both = |of: &str| {
        let less = "%l = lt.s %i, %n : bool\n%m = lt.s %i, %e : bool\n";
        format!("{}{less}{}", extent("e", of), where_so("and %l, %m", true, "%i", "i64"))
    };
    let low = "-9223372036854775808..=1099511627775";
    check(&both("@q, 0"), &format!("{low} <=x.0-1 <=q.0-1"));
    check(&both("@q, 1"), &format!("{low} <=x.0-1 <=q.1-1"));
    check(&both("@x, 0"), &format!("{low} <=x.0-1"));
    let rows = format!("{}%l = lt.s %i, %w : bool\n%m = lt.s %i, %e : bool\n", extent("e", "@q, 0"));
    check(&format!("{rows}{}", where_so("and %l, %m", true, "%i", "i64")), &format!("{low} <=q.1-1 <=q.0-1"));
    // A selected value is below only the extents that both values are below, at the smaller distance.
    let one_of = |a: &str, o: &str| {
        format!("{}{}{}", extent("e", a), extent("g", o), of("select", "%b, %e, %g", "i64"))
    };
    check(&one_of("@x, 0", "@q, 0"), "0..=1099511627776");
    check(&one_of("@q, 0", "@q, 1"), "0..=1099511627776");
    check(&one_of("@q, 1", "@q, 1"), "0..=1099511627776 /4 <=q.1+0");
    check("%v = select %b, %n, %1 : i64\n%r = bitreverse %v : i64", "0..=1099511627776");
    // At most eight extents are kept.
    let all: Vec<_> =
        ["@x, 0", "@q, 0", "@q, 1", "@a, 0", "@a, 1", "@c, 1", "@d, 0", "@d, 1", "@d, 2", "@d, 3"]
            .into_iter()
            .enumerate()
            .map(|(n, of)| (n, extent(&format!("e{n}"), of)))
            .collect();
    let nested = all.iter().rev().fold("%r = bitreverse %i : i64".to_owned(), |body, (n, extent)| {
        format!("{extent}%c{n} = lt.s %i, %e{n} : bool\nif %c{n} {{\n{body}\n}}")
    });
    let eight = "<=x.0-1 <=q.0-1 <=q.1-1 <=a.0-1 <=a.1-1 <=c.1-1 <=d.0-1 <=d.1-1";
    check(&nested, &format!("{low} {eight}"));
}

#[test]
fn every_comparison_teaches() {
    let below = "-9223372036854775808..=1099511627775 <=x.0-1";
    let at_most = "-9223372036854775808..=1099511627776 <=x.0+0";
    let (above, at_least) = ("1..=9223372036854775807", "0..=9223372036854775807");
    // Facts about `%i`, as the left operand and as the right one.
    for (op, reverse, then, or_else) in [
        ("lt.s", "gt.s", below, at_least),
        ("le.s", "ge.s", at_most, above),
        ("gt.s", "lt.s", above, at_most),
        ("ge.s", "le.s", at_least, below),
        ("lt.u", "gt.u", "0..=1099511627775 <=x.0-1", ANY),
        ("le.u", "ge.u", "0..=1099511627776 <=x.0+0", ANY),
        ("gt.u", "lt.u", ANY, "0..=1099511627776 <=x.0+0"),
        ("ge.u", "le.u", ANY, "0..=1099511627775 <=x.0-1"),
        ("eq", "eq", "0..=1099511627776 <=x.0+0", ANY),
        ("ne", "ne", ANY, "0..=1099511627776 <=x.0+0"),
    ] {
        check(&where_so(&format!("{op} %i, %n"), true, "%i", "i64"), then);
        check(&where_so(&format!("{op} %i, %n"), false, "%i", "i64"), or_else);
        check(&where_so(&format!("{reverse} %n, %i"), true, "%i", "i64"), then);
        check(&where_so(&format!("{reverse} %n, %i"), false, "%i", "i64"), or_else);
    }
    // An unsigned comparison teaches about both operands if neither is negative.
    let v = "%v = zext %t : i64\n";
    check(&format!("{v}{}", where_so("gt.u %v, %n", true, "%v", "i64")), "1..=63");
    check(&format!("{v}{}", where_so("gt.u %v, %n", true, "%n", "i64")), "0..=62 <=x.0+0");
    check(&format!("{v}{}", where_so("lt.u %v, %n", false, "%n", "i64")), "0..=63 <=x.0+0");
    check(&where_so("eq %i, %4", true, "%i", "i64"), "4..=4");
    // A condition that cannot hold teaches nothing.
    let beyond = "%most = const 100 : i32\n";
    check(&format!("{beyond}{}", where_so("gt.s %few, %most", true, "%few", "i32")), "0..=100");
    check(&format!("{beyond}{}", where_so("ge.s %few, %most", true, "%few", "i32")), "100..=100");
}

#[test]
fn joined_conditions_teach() {
    let (low, high) = ("ge.s %i, %0", "lt.s %near, %1");
    for negated in [false, true] {
        let joined = |join: &str, holds: bool, value: &str| {
            let both = format!("%l = {low} : bool\n%m = {high} : bool\n%p = {join} %l, %m : bool\n");
            let branch = match negated {
                false => where_so("and %p, %p", holds, value, "i64"),
                true => where_so("not %p", !holds, value, "i64"),
            };
            format!("{both}{branch}")
        };
        check(&joined("and", true, "%i"), "0..=9223372036854775807");
        check(&joined("and", true, "%near"), "-8..=0");
        check(&joined("and", false, "%i"), ANY);
        check(&joined("and", false, "%near"), "-8..=8");
        check(&joined("or", false, "%i"), if negated { "-9223372036854775808..=-1" } else { ANY });
        check(&joined("or", false, "%near"), if negated { "1..=8" } else { "-8..=8" });
        check(&joined("or", true, "%near"), "-8..=8");
    }
    // A comparison of floats teaches nothing about integers.
    check(&where_so("eq %f, %f", true, "%i", "i64"), ANY);
}

/// A condition is followed through eight definitions.
#[test]
fn conditions_are_followed_so_far() {
    let few = "%c0 = lt.s %j, %few : bool\n";
    let chain = |count: usize, each: &dyn Fn(usize) -> String, first: &str| {
        let body = (0..count).map(each).collect::<String>();
        let last = format!("if %c{count} {{\n%r = bitreverse %j : i32\n}} else {{\n}}");
        format!("%true = const true : bool\n{first}{body}{last}")
    };
    let nots = |n: usize| format!("%c{} = not %c{n} : bool\n", n + 1);
    let lefts = |n: usize| format!("%c{} = and %c{n}, %true : bool\n", n + 1);
    let rights = |n: usize| format!("%c{} = and %true, %c{n} : bool\n", n + 1);
    let known = "-2147483648..=99";
    check(&chain(8, &nots, few), known);
    check(&chain(10, &nots, few), ANY_32);
    for each in [&lefts as &dyn Fn(usize) -> String, &rights] {
        check(&chain(8, each, few), known);
        check(&chain(9, each, few), ANY_32);
    }

    // The limit holds for sums and extensions too.
    let sums = |count: usize, of: &str, last: &str, ty: &str, bound: &str| {
        let ones = (0..count).map(|n| format!("%s{} = add %s{n}, %one : {of}\n", n + 1)).collect::<String>();
        format!("%one = const 1 : {of}\n%s0 = add %few, %one : i32\n{ones}{last}%c = lt.s %v, %{bound} : bool\nif %c {{\n\
                 %r = bitreverse %few : i32\n}}").replace("{ty}", ty)
    };
    let twenty = "%twenty = const 20 : i32\n";
    let alone = |count: usize| {
        format!(
            "{twenty}{}",
            sums(count, "i32", &format!("%v = add %s{count}, %one : i32\n"), "i32", "twenty")
        )
    };
    check(&alone(6), "0..=11");
    check(&alone(7), "0..=100");
    for widen in ["sext", "zext"] {
        let widened = |count: usize| {
            let last = format!("%v = {widen} %s{count} : i64\n%bound = const 20 : i64\n");
            sums(count, "i32", &last, "i64", "bound")
        };
        check(&widened(6), "0..=12");
        check(&widened(7), "0..=100");
    }
}

/// A condition narrows a limited number of values, the left ones first.
#[test]
fn conditions_teach_so_much() {
    fn all(from: usize, to: usize, text: &mut String) -> String {
        if to - from == 1 {
            text.push_str(&format!(
                "%k{from} = const {from} : i64\n%v{from} = mul %i, %k{from} : i64\n%c{from} = lt.s %v{from}, %1 : bool\n"
            ));
            return format!("%c{from}");
        }
        let middle = usize::midpoint(from, to);
        let (a, o) = (all(from, middle, text), all(middle, to, text));
        text.push_str(&format!("%a{from}x{to} = and {a}, {o} : bool\n"));
        format!("%a{from}x{to}")
    }
    let mut text = String::new();
    let joined = all(100, 132, &mut text);
    let of = |value: usize| format!("{text}if {joined} {{\n%r = bitreverse %v{value} : i64\n}}");
    // 32 comparisons exceed the limit.
    check(&of(101), "-9223372036854775808..=0");
    check(&of(131), ANY);
}

#[test]
fn operands_of_what_is_compared() {
    let v = |op: &str| format!("%v = {op} : i64\n");
    check(&(v("sext %j") + &where_so("lt.s %v, %4", true, "%j", "i32")), "-2147483648..=3");
    check(&(v("sext %j") + &where_so("lt.s %v, %n", true, "%j", "i32")), "-2147483648..=2147483647 <=x.0-1");
    check(&(v("zext %few") + &where_so("lt.s %v, %4", true, "%few", "i32")), "0..=3");
    // The zero extension of a number that may be negative tells nothing about the number.
    check(&(v("zext %j") + &where_so("gt.s %v, %4", true, "%j", "i32")), ANY_32);
    // A sum that does not wrap narrows both operands.
    let sum =
        "%t64 = zext %t : i64\n%v = add %t64, %near : i64\n%10 = const 10 : i64\n%20 = const 20 : i64\n";
    check(&format!("{sum}{}", where_so("lt.s %v, %10", true, "%t64", "i64")), "0..=17");
    check(&format!("{sum}{}", where_so("gt.s %v, %20", true, "%t64", "i64")), "13..=63");
    check(&format!("{sum}{}", where_so("lt.s %v, %n", true, "%t64", "i64")), "0..=63 <=x.0+7");
    check(&format!("{sum}{}", where_so("lt.s %v, %n", true, "%near", "i64")), "-8..=8 <=x.0-1");
    check(&format!("{sum}{}", where_so("gt.s %v, %20", true, "%near", "i64")), "-8..=8");
    // A sum that reaches the last number does not wrap; one that may pass either end does.
    let zero = "%z = const 0 : i32\n%v = add %j, %z : i32\n";
    check(&format!("{zero}{}", where_so("lt.s %v, %few", true, "%j", "i32")), "-2147483648..=99");
    let wraps = "%less = const -4 : i64\n%v = add %i, %less : i64\n";
    check(&format!("{wraps}{}", where_so("lt.s %v, %n", true, "%i", "i64")), ANY);
    check(&format!("{wraps}{}", where_so("gt.s %v, %n", true, "%i", "i64")), ANY);
}

/// Only a pure op repeats its value: memory may change between two loads.
#[test]
fn only_pure_ops_repeat() {
    let twice = |op: &str| {
        format!(
            "%u = {op} : i64\n%c = lt.u %u, %n : bool\nif %c {{\n%v = {op} : i64\n%r = bitreverse %v : i64\n}}"
        )
    };
    check(&twice("load @d[%0, %0, %0, %0]"), ANY);
    check(&twice("add %i, %4"), "0..=1099511627775 <=x.0-1");
    check(&twice("mul %i, %4"), "0..=1099511627772 /4 <=x.0-1");
}

#[test]
fn branches_join() {
    let joined =
        |head: &str, regions: &str| format!("%e = {head} : i64 {{\n{regions}}}\n%r = bitreverse %e : i64");
    check(&joined("if %b", "yield %4\n} else {\nyield %near\n"), "-8..=8");
    check(&joined("if %b", "yield %n\n} else {\nyield %4\n"), "0..=1099511627776");
    let cases = "case 0 {\nyield %near\n}\ncase 1 {\nyield %n\n}\ndefault {\nyield %4\n}\n";
    check(&joined("switch %t", cases), "-8..=1099511627776");
    // A fact from one region does not hold in the next one, nor after the switch.
    let learns = "%c = lt.s %i, %4 : bool\nif %c {\n%u = add %i, %i : i64\n}\nyield %4\n";
    let cases = format!("case 0 {{\n{learns}}}\ndefault {{\nyield %i\n}}\n");
    check(&joined("switch %t", &cases), ANY);
}

#[test]
fn counts_of_loops() {
    let fixed = |low: i64, high: i64, step: i64, body: &str| {
        format!(
            "%l = const {low} : i64\n%h = const {high} : i64\n%s = const {step} : i64\nfor %c: i64 = %l to %h step %s {{\n{body}\n}}"
        )
    };
    let most = i64::MAX as u64;
    check_loop(&fixed(0, 0, 2, ""), 0, Some(0), true, most / 2);
    check_loop(&fixed(0, 5, 1, ""), 5, Some(5), true, most - 5);
    check_loop(&fixed(3, 15, 5, ""), 3, Some(3), true, (most - 15) / 5);
    check_loop(&fixed(-7, 7, 7, ""), 2, Some(2), true, (most - 7) / 7);
    let count = "%r = bitreverse %c : i64";
    check(&fixed(0, 12, 5, count), "0..=10");
    check(&fixed(3, 15, 5, count), "3..=13");
    check(&fixed(5, 5, 1, count), "5..=5");
    check(&fixed(4, 20, 8, count), "4..=12 /4");
    // The smallest step bounds the iterations, the largest one the room.
    let step = "%s = add %up, %20 : i64\nfor %c: i64 = %0 to %h step %s {\n}";
    let body = format!("%20 = const 20 : i64\n%h = const 100 : i64\n{step}");
    check_loop(&body, 7, None, true, (most - 100) / 27);
}

#[test]
fn accesses_at_their_bounds() {
    let half = "%one = const 1 : i32\n%half = shr.u %t, %one : i32\n";
    let at = |by: i32, access: &str| {
        format!("{half}%by = const {by} : i32\n%v = add %half, %by : i32\n%a = load {access}")
    };
    check_access(&at(16, "@m[%4, %v] : f32"), "[true] All /1 +16");
    check_access(&at(17, "@m[%4, %v] : f32"), "[true] Together /1 +17");
    check_access(&at(15, "@m[%4, %v] : vec2<f32>"), "[true] All /1 +15");
    check_access(&at(-1, "@m[%4, %v] : f32"), "[true] Together /1 -1");
    check_access(&at(8, "@s[%v] : f32"), "[] All /1 +8");
    check_access(&at(9, "@s[%v] : f32"), "[] Together /1 +9");
    // The outer index: `@m` has 5 rows.
    let row = |row: i64| format!("{half}%row = const {row} : i64\n%a = load @m[%row, %half] : f32");
    check_access(&row(4), "[true] All /1 +0");
    check_access(&row(5), "[false] All /1 +0");
    check_access(&row(-1), "[false] All /1 +0");
    // Eight lanes at a multiple of eight, in rows of a multiple of 4 and of 16.
    let eights = "%8 = const 8 : i64\n%i8 = mul %i, %8 : i64\n";
    check_access(&format!("{eights}%a = load @q[%0, %i8] : vec8<f32>"), "[false] Each /8 +0");
    check_access(&format!("{eights}%a = load @m[%0, %i8] : vec8<f32>"), "[true] Together /8 +0");
    // A sum that may wrap is no distance. The constant may be the first operand.
    check_access("%m = const -4 : i64\n%v = add %i, %m : i64\n%a = load @x[%v] : f32", "[] Together /1 +0");
    check_access("%v = add %i, %1 : i64\n%a = load @x[%v] : f32", "[] Together /1 +0");
    check_access(
        &format!(
            "{half}%by = const 3 : i32\n%v = add %by, %half : i32\n%u = add %v, %by : i32\n%a = load @x[%u] : f32"
        ),
        "[] Together /1 +6",
    );
    check_access(&format!("{half}%v = add %half, %few : i32\n%a = load @x[%v] : f32"), "[] Together /1 +0");
}

#[test]
fn accesses_by_bytes() {
    let sixteen = "%16 = const 16 : i64\n%i16 = mul %i, %16 : i64\n";
    let inside = |view: &str, index: &str, last: i64| {
        format!(
            "{sixteen}%k = extent {view}, 0 : i64\n%last = const {last} : i64\n%e = add %{index}, %last : i64\n\
             %l = lt.s %e, %k : bool\n%m = lt.u %{index}, %k : bool\n%c = and %m, %l : bool\n\
             if %c {{\n%a = load {view}[%{index}] : vec4<f32>\n}}"
        )
    };
    let unknown = |index: &str| format!("{sixteen}%a = load @b16[%{index}] : vec4<f32>");
    check_access(&unknown("i"), "[] Bytes { within: false, aligned: false } /1 +0");
    check_access(&unknown("i16"), "[] Bytes { within: false, aligned: true } /16 +0");
    // Both index and extent are multiples of 16, so the index is at least 16 below.
    check_access(&inside("@b16", "i16", 0), "[] All /16 +0");
    check_access(&inside("@b", "i16", 0), "[] Bytes { within: false, aligned: true } /16 +0");
    check_access(&inside("@b16", "i", 0), "[] Bytes { within: false, aligned: false } /1 +0");
}

/// Steps count ops, operands and narrowed values; a service limits its work by them.
#[test]
fn steps_are_counted() {
    let steps = |body: &str| Ranges::of(&module(body).kernels()[0]).steps();
    let base = steps("");
    let more = |body: &str| steps(body) - base;
    // One for the op, one for each operand, one for the result.
    assert_eq!(more("%v = add %i, %4 : i64"), 1 + 2 + 1);
    assert_eq!(more("%v = lane_id : i32"), 1 + 1);
    // A repeated op reuses the fact of the first one.
    assert_eq!(more("%v = add %i, %4 : i64\n%u = add %i, %4 : i64"), 4 + 3);
    // The facts of a division's two operands are kept.
    assert_eq!(more("%v = div.s %i, %4 : i64"), 1 + 2 + 1 + 2);
    let learnt = |condition: &str| {
        let compared = format!("%no = const false : bool\n%v = zext %no : i64\n%c = {condition} : bool\n");
        more(&format!("{compared}if %c {{\n}} else {{\n}}")) - more(&compared)
    };
    // The `if` and its operand, its condition in both regions, and the narrowed operands.
    assert_eq!(learnt("eq %f, %f"), 2 + 2);
    assert_eq!(learnt("lt.s %i, %4"), 2 + 2 + 3 + 3);
    assert_eq!(learnt("lt.s %v, %1"), 2 + 2 + 3 + 3);
}
