//! What plans say of small kernels.

use super::*;
use vm_ir::op::Shape;
use vm_ir::{text, validate};

/// Those of a GPU.
pub(super) fn ptx() -> Parameters {
    crate::backend::ptx::safety(&crate::backend::ptx::Options::new("sm_90a".parse().unwrap()))
}

const PARAMS: &str = "@x: view<f32, [?], readwrite>, @n: view<i32, [?], readwrite>, %v: f32, %i: i64, %j: i32, \
                      %few: i32 in [0, 100], %many: i32 in [0, 1000000]";
const ENDLESS: &str = "while {\n%u = lt.s %j, %j : bool\nyield %u\n} do {\n}";
const ATOMIC: &str = "%a = atomic.add.device @n[%i], %j : i32";

/// The bound of a kernel with this body, and its loops in the order of the text.
fn plan(trust: Trust, block: &str, params: &str, body: &str) -> (u64, Vec<Loop>) {
    let text = format!("vir 1\nkernel @k({params}) at 0x0 block({block}) {{\n{body}\n}}");
    let module =
        validate(text::parse(&text).unwrap(), trust).unwrap_or_else(|error| panic!("{text}: {error}"));
    let kernel = &module.kernels()[0];
    let plan = SafetyPlan::of(kernel, trust, &ptx()).unwrap();
    let mut loops = Vec::new();
    kernel.for_each_op(&mut |op| loops.extend(plan.loop_of(op).copied()));
    (plan.bound(), loops)
}

fn bound(trust: Trust, block: &str, params: &str, body: &str) -> u64 {
    plan(trust, block, params, body).0
}

/// What every thread of a block of 32 does.
const REST: u64 = 8 + 2048 / 32;

/// What the body costs beside that.
fn check(body: &str, expect: u64) {
    assert_eq!(bound(Trust::Guest, "32", PARAMS, body), expect + REST, "{body}");
}

/// A loop up to a bound, which is defined before, around a body. It costs 2 beside itself.
fn around(name: &str, bound: &str, hint: u64, body: &str) -> String {
    let hint = if hint == 0 { String::new() } else { format!(" unroll {hint}") };
    format!(
        "%{name}0 = const 0 : i32\n%{name}1 = const 1 : i32\n\
         for %{name}: i32 = %{name}0 to {bound} step %{name}1{hint} {{\n{body}\n}}"
    )
}

fn constant(name: &str, bound: u64, hint: u64, body: &str) -> String {
    format!("%{name}2 = const {bound} : i32\n{}", around(name, &format!("%{name}2"), hint, body))
}

/// What an atomic op costs that LLVM has a loop for.
#[test]
fn atomics_that_compare_and_swap_are_charged_for_the_others() {
    use crate::backend::amdgcn::{Chip, Options, safety};

    let check = |chip: &str, op: &str, ty: &str, tries: u64| {
        let (place, cost) = if op.ends_with("@s") { ("@s", 256) } else { ("@x", 1024) };
        let op = op.trim_end_matches("@s");
        let text = format!(
            "vir 1\nkernel @k(@x: view<{ty}, [?], readwrite>, %v: {ty}, %i: i64) at 0x0 block(32) {{\n\
             shared @s: {ty}[32]\n%a = atomic.{op} {place}[%i], %v : {ty}\n}}"
        );
        let module = validate(text::parse(&text).unwrap(), Trust::Trusted).unwrap();
        let costs = safety(&Options { chip: chip.parse::<Chip>().unwrap() }).costs;
        let kernel = &module.kernels()[0];
        let mut found = 0;
        kernel.for_each_op(&mut |op| found = cost::of(kernel, op, costs));
        assert_eq!(found, cost * tries, "{chip} {text}");
    };
    for (chip, wave) in [("gfx942", 64), ("gfx950", 64), ("gfx1201", 32)] {
        check(chip, "add.system", "f32", wave);
        check(chip, "min.s.system", "i64", wave);
        check(chip, "xor.system", "i32", wave);
        check(chip, "add.device", "f32", 1);
        check(chip, "max.u.block", "i32", 1);
        check(chip, "and.system@s", "i32", 1);
    }
    for (chip, wave) in [("gfx90a", 64), ("gfx1100", 32)] {
        check(chip, "add.block", "f32", wave);
        check(chip, "or.device", "i64", wave);
        check(chip, "add.device@s", "f32", 1);
        check(chip, "add.system", "i64", 1);
        check(chip, "exchange.system", "i32", 1);
    }
    check("gfx1201", "add.block@s", "f64", 32);
    check("gfx942", "add.block@s", "f64", 1);
}

#[test]
fn operations_are_weighed() {
    check("", 0);
    check("%a = add %v, %v : f32", 1);
    check("%a = div %v, %v : f32\n%b = exp.fast %v : f32\n%c = div.s %j, %j : i32", 3 * 64);
    check("%a = fpconv %v : f64\n%b = add %a, %a : f64", 8 + 4);
    check("%a = load @x[%i] : f32\nstore @x[%i], %a", 2 * 16);
    check("%a = load @x[%i] : vec4<f32>\n%b = add %a, %a : vec4<f32>", 4 * 16 + 4);
    check(ATOMIC, 1024);
    check("barrier.block\n%a = warp.add %v : f32", 2 * 64);
    // Both sides of a branch: a warp may take both.
    check(
        "%a = lt.s %j, %j : bool\nif %a {\nstore @x[%i], %v\n} else {\nstore @x[%i], %v\n}",
        1 + 1 + 2 * 16,
    );
}

#[test]
fn loops_cost_their_iterations_until_they_are_polled() {
    let body = "%a = load @x[%i] : f32\n%b = add %a, %a : f32";
    // The body's, and one for the iteration.
    let each = 16 + 1 + 1;
    check(&constant("c", 0, 0, body), 3 + each);
    check(&constant("c", 10, 0, body), 3 + 10 * each + 1);
    check(&constant("c", 4096, 0, body), 3 + 4096 * each + 1);
    check(&constant("c", 4097, 0, body), 3 + each);
    check(&around("c", "%few", 0, body), 2 + 100 * each + 1);
    check(&around("c", "%j", 0, body), 2 + each);
    // Together they are long, so the outer one is polled.
    let inner = 1 + 2 + 100 * each + 1;
    let nested = |hint| around("c", "%few", hint, &around("d", "%few", 0, body));
    check(&nested(0), 2 + inner);
    // The copies of a polled loop count until there is a poll point between.
    check(&nested(128), 2 + 40 * inner);
    check(ENDLESS, 1 + 1);
}

#[test]
fn what_is_polled() {
    // A loop, as its bound, how it is unrolled, and iterations between two poll points.
    type Short = (Option<u64>, Unroll, Option<u64>);
    let check = |body: &str, expect: &[Short]| {
        let (_, loops) = plan(Trust::Guest, "32", PARAMS, body);
        let short = |l: &Loop| (l.bound, l.unroll, l.poll.map(|poll| poll.every));
        assert_eq!(loops.iter().map(short).collect::<Vec<Short>>(), expect, "{body}");
    };
    let (store, none) = ("store @x[%i], %v", Unroll::None);
    check(&constant("c", 4096, 0, store), &[(Some(4096), none, None)]);
    check(&constant("c", 4097, 0, store), &[(Some(4097), none, Some(1))]);
    check(&around("c", "%j", 0, store), &[(Some(i32::MAX as u64), none, Some(1))]);
    check(ENDLESS, &[(None, none, Some(1))]);
    // Too costly together.
    check(&constant("c", 1000, 0, ATOMIC), &[(Some(1000), none, None)]);
    check(&constant("c", 1100, 0, ATOMIC), &[(Some(1100), none, Some(1))]);
    // Of a nest, the loop that makes it long; or that which makes it costly.
    let nest = |outer: u64, hint: u64, body: &str| constant("c", outer, hint, &constant("d", 4096, 0, body));
    check(&nest(256, 0, store), &[(Some(256), none, Some(1)), (Some(4096), none, None)]);
    check(&nest(256, 256, store), &[(Some(256), Unroll::Full(256), Some(1)), (Some(4096), none, None)]);
    check(&nest(256, 256, ATOMIC), &[(Some(256), Unroll::Full(256), None), (Some(4096), none, Some(1))]);
    check(&nest(1000, 16, store), &[(Some(1000), Unroll::Partial(16), Some(1)), (Some(4096), none, None)]);
    // Unrolled loops have poll points between their copies.
    let partial = |bound: u64, body: &str| around("c", "%many", 64, &constant("d", bound, 0, body));
    let million = Some(1_000_000);
    check(&around("c", "%many", 64, store), &[(million, Unroll::Partial(64), Some(64))]);
    check(&partial(100, store), &[(million, Unroll::Partial(64), Some(40)), (Some(100), none, None)]);
    check(&partial(100, ATOMIC), &[(million, Unroll::Partial(64), Some(10)), (Some(100), none, None)]);
    check(&around("c", "%few", 2, ENDLESS), &[(Some(100), Unroll::Partial(2), None), (None, none, Some(1))]);
    // One behind the other, they are long together.
    let two = constant("c", 4000, 0, store) + "\n" + &constant("d", 100, 0, store);
    check(&two, &[(Some(4000), none, None), (Some(100), none, Some(1))]);
}

#[test]
fn long_iterations_are_charged() {
    let check = |body: &str, threads: u64, expect: Option<i64>| {
        let (_, loops) = plan(Trust::Guest, "32", PARAMS, body);
        assert_eq!(loops[0].poll.unwrap().charge(threads), expect, "{body}");
    };
    check(&around("c", "%j", 0, "%a = div %v, %v : f32"), 1, None);
    check(&around("c", "%j", 0, "%a = div %v, %v : f32"), 32, Some(32 * 65));
    check(&around("c", "%j", 0, ATOMIC), 1, Some(1025));
    // An iteration with a short loop inside, and one that is as much as all that lies between two polls.
    let nested = around("c", "%j", 0, &around("d", "%few", 0, ATOMIC));
    check(&nested, 1, Some(1 + 2 + 100 * 1025 + 1));
    check(&nested, 16, Some((1 << 20) + 1));
}

#[test]
fn what_nothing_polls_has_no_bound() {
    let body = around("c", "%j", 0, "%a = add %v, %v : f32");
    assert_eq!(bound(Trust::Trusted, "32", PARAMS, &body), (i32::MAX as u64) * 2 + 2 + 1 + REST);
    assert_eq!(bound(Trust::Trusted, "32", PARAMS, ENDLESS), u64::MAX);
}

#[test]
fn a_block_is_not_for_nothing() {
    assert_eq!(bound(Trust::Guest, "1", "", ""), 8 + 2048);
    assert_eq!(bound(Trust::Guest, "1024", "", ""), 8 + 2);
    assert_eq!(bound(Trust::Guest, "1", "", "shared @s: f32[1024]"), 8 + 2048 + 8 * 1024);
}

/// Blocks that gather can't be cancelled, so their loops are polled only where nothing else keeps them short.
#[test]
fn clusters_that_gather_are_left_alone() {
    let gathers = "cluster(2) {\nshared @s: f32[2]\ncluster.gather @s, %w";
    let body = |gathers: &str| {
        let looped = constant("c", 1100, 0, ATOMIC);
        format!("vir 1\nkernel @k({PARAMS}) at 0x0 block(32) {gathers}\n{looped}\n}}")
    };
    for (head, polled) in [("{", true), (&gathers.replace("%w", "%v")[..], false)] {
        let text = body(head);
        let module =
            validate(text::parse(&text).unwrap(), Trust::Guest).unwrap_or_else(|e| panic!("{e}\n{text}"));
        let kernel = &module.kernels()[0];
        let plan = SafetyPlan::of(kernel, Trust::Guest, &ptx()).unwrap();
        assert_eq!(plan.cancellable(), polled, "{text}");
    }
}

#[test]
fn ops_are_numbered_in_the_order_of_the_text() {
    let text =
        format!("vir 1\nkernel @k({PARAMS}) at 0x0 block(32) {{\n{}\n}}", around("c", "%few", 0, ATOMIC));
    let module = validate(text::parse(&text).unwrap(), Trust::Guest).unwrap();
    let kernel = &module.kernels()[0];
    let plan = SafetyPlan::of(kernel, Trust::Guest, &ptx()).unwrap();
    let mut numbers = Vec::new();
    kernel.for_each_op(&mut |op| numbers.push(plan.number(op)));
    assert_eq!(numbers, (0..4).map(|n| Some(OpId(n))).collect::<Vec<_>>());
    kernel.for_each_op(&mut |op| {
        assert_eq!(plan.access(op).is_some(), op.code.shape() != Shape::For && op.place.is_some())
    });
}

/// A plan that is not safe is found out.
#[test]
fn wrong_plans_are_found_out() {
    let check = |body: &str, damage: fn(&mut Decision), found: &str| {
        let text = format!("vir 1\nkernel @k({PARAMS}) at 0x0 block(32) {{\n{body}\n}}");
        let module = validate(text::parse(&text).unwrap(), Trust::Guest).unwrap();
        let kernel = &module.kernels()[0];
        let mut plan = SafetyPlan::of(kernel, Trust::Guest, &ptx()).unwrap();
        plan.verify().unwrap();
        plan.decisions.iter_mut().for_each(damage);
        let error = plan.verify().unwrap_err().to_string();
        assert!(error.contains(found), "{body}: {error}");
    };
    let unpolled: fn(&mut Decision) = |decision| {
        decision.looped.iter_mut().for_each(|planned| planned.poll = None);
    };
    let rarely: fn(&mut Decision) = |decision| {
        decision
            .looped
            .iter_mut()
            .filter_map(|planned| planned.poll.as_mut())
            .for_each(|poll| poll.every = 64);
    };
    let cheap: fn(&mut Decision) = |decision| {
        decision.looped.iter_mut().for_each(|planned| planned.iteration /= 2);
    };
    let store = "store @x[%i], %v";
    check(ENDLESS, unpolled, "iterations between two polls");
    check(&constant("c", 256, 256, &constant("d", 4096, 0, store)), unpolled, "1048576 iterations");
    check(&around("c", "%many", 64, &constant("d", 100, 0, store)), rarely, "6400 iterations");
    check(&around("c", "%j", 0, &constant("d", 100, 0, store)), rarely, "64 iterations");
    check(&around("c", "%j", 0, &constant("d", 100, 0, store)), cheap, "operations between two polls");
    check(store, |decision| decision.access = None, "nothing is planned");
}

/// Checks the planned accesses in text order: outer indices, last index, bytes of an access by bytes.
#[track_caller]
fn check_accesses(trust: Trust, body: &str, expect: &[&str]) {
    let text = format!(
        "vir 1\nkernel @k(@m: view<f32, [5, 48], readwrite>, @q: view<f32, [?, ?*12], readwrite>, \
         @b: view<i8, [?*16], readwrite, align 16>, @p: surface<f32, [?, ?, 4], readwrite>, %f: f32, %i: i64, \
         %row: i64 in [0, 4], %below: i64 in [0, 5], %column: i64 in [0, 44]) at 0x0 block(32) {{\n\
         shared @s: f32[40]\n%4 = const 4 : i64\n%16 = const 16 : i64\n%i4 = mul %i, %4 : i64\n\
         %i16 = mul %i, %16 : i64\n{body}\n}}"
    );
    let module = validate(text::parse(&text).unwrap(), trust).unwrap_or_else(|e| panic!("{text}: {e}"));
    let kernel = &module.kernels()[0];
    for parameters in [ptx(), crate::backend::cpu::SAFETY] {
        let plan = SafetyPlan::of(kernel, trust, &parameters).unwrap();
        let mut found = Vec::new();
        kernel.for_each_op(&mut |op| {
            found.extend(plan.access(op).map(|a| format!("{:?} {:?} {:?}", a.outer, a.last, a.bytes)));
        });
        assert_eq!(found, expect, "{body}");
    }
}

#[test]
fn accesses_are_checked_unless_they_are_proven() {
    let guest = |body: &str, expect: &str| check_accesses(Trust::Guest, body, &[expect]);
    guest("%a = load @m[%row, %column] : f32", "[Proven] Unchecked(Proven) None");
    guest("%a = load @m[%below, %column] : f32", "[Needed] Unchecked(Proven) None");
    guest("%a = load @m[%row, %column] : vec4<f32>", "[Proven] Unchecked(Proven) None");
    guest("%a = load @m[%row, %column] : vec8<f32>", "[Proven] Lanes None");
    guest("%a = load @m[%row, %i] : f32", "[Proven] First None");
    guest("%a = load @m[%row, %i] : vec4<f32>", "[Proven] Lanes None");
    guest("%a = load @m[%row, %i4] : vec4<f32>", "[Proven] First None");
    guest("store @q[%i, %i4], %f", "[Needed] First None");
    guest("%a = load @s[%column] : f32", "[] First None");
    guest("%a = load @s[%row] : f32", "[] Unchecked(Proven) None");
    // An access by bytes is checked for whatever is not proven.
    guest("%a = load @b[%i] : vec4<f32>", "[] Bytes { within: true, aligned: true } Some(16)");
    guest("%a = load @b[%i16] : vec4<f32>", "[] Bytes { within: true, aligned: false } Some(16)");
    let below = |index: &str| {
        format!(
            "%n = extent @b, 0 : i64\n%15 = const 15 : i64\n%e = add %{index}, %15 : i64\n%l = lt.s %e, %n : bool\n\
             %h = lt.u %{index}, %n : bool\n%c = and %h, %l : bool\nif %c {{\n%a = load @b[%{index}] : vec4<f32>\n}}"
        )
    };
    guest(&below("i16"), "[] Unchecked(Proven) Some(16)");
    // Pixels are checked for trusted kernels too, in both dimensions.
    let pixel = "%a = load @p[%row, %row] : vec4<f32>";
    for trust in [Trust::Guest, Trust::Trusted] {
        check_accesses(trust, pixel, &["[Needed, Needed] Unchecked(Proven) None"]);
    }
    let trusted = |body: &str, expect: &str| check_accesses(Trust::Trusted, body, &[expect]);
    trusted("%a = load @m[%row, %i] : vec4<f32>", "[Proven] Unchecked(Trusted) None");
    trusted("%a = load @m[%i, %column] : f32", "[Trusted] Unchecked(Proven) None");
    trusted("%a = load @b[%i] : vec4<f32>", "[] Unchecked(Trusted) Some(16)");
}

#[test]
fn checks_are_asked_for_by_dimension() {
    let module = text::parse("vir 1\nkernel @k(%i: i64) at 0x0 block(32) {\n}").unwrap();
    let module = validate(module, Trust::Guest).unwrap();
    let mut values = Vec::new();
    for param in module.kernels()[0].params() {
        if let vm_ir::module::ParamKind::Scalar { value, .. } = param.kind {
            values.push(value);
        }
    }
    use super::access::Check::{Needed, Proven, Trusted};
    let access = Access {
        outer: vec![Needed, Proven, Trusted],
        last: Last::Lanes,
        bytes: None,
        shift: 0,
        base: (values[0], 0),
    };
    // A dimension without an entry is checked.
    assert_eq!([0, 1, 2, 3].map(|dimension| access.checks(dimension)), [true, false, false, true]);
    let proven = access.proven();
    assert_eq!((&proven.outer[..], proven.last), (&[Proven; 3][..], Last::Unchecked(Proven)));
    let bytes = Last::Bytes { within: true, aligned: false };
    for (last, checked) in [
        (Last::Lanes, true),
        (Last::First, true),
        (bytes, true),
        (Last::Unchecked(Proven), false),
        (Last::Unchecked(Trusted), false),
    ] {
        assert_eq!(last.is_checked(), checked, "{last:?}");
    }
}

/// Checks which loads are done once, in text order.
#[track_caller]
fn check_once(body: &str, expect: &[bool]) {
    let text = format!(
        "vir 1\nkernel @k({PARAMS}, @l: view<i64, [?], readwrite>) at 0x0 block(32) {{\nlocal @t: i8[32]\n\
         %0 = const 0 : i64\n%1 = const 1 : i64\n%8 = const 8 : i64\n{body}\n}}"
    );
    for (trust, parameters) in
        [(Trust::Guest, ptx()), (Trust::Guest, crate::backend::cpu::SAFETY), (Trust::Trusted, ptx())]
    {
        let module = validate(text::parse(&text).unwrap_or_else(|e| panic!("{text}: {e}")), trust)
            .unwrap_or_else(|e| panic!("{text}: {e}"));
        let kernel = &module.kernels()[0];
        let plan = SafetyPlan::of(kernel, trust, &parameters).unwrap();
        let mut found = Vec::new();
        kernel.for_each_op(&mut |op| {
            if op.code.shape() == Shape::Load {
                found.push(plan.loads_once(op));
            }
        });
        let expect: Vec<_> = expect.iter().map(|once| *once && trust == Trust::Guest).collect();
        assert_eq!(found, expect, "{trust:?}: {body}");
    }
}

#[test]
fn loads_that_decide_are_done_once() {
    let load = "%a = load @l[%i] : i64\n";
    let after = |body: &str, expect: &[bool]| check_once(&format!("{load}{body}"), expect);
    let at = |index: &str| format!("store @x[%{index}], %v");
    // A loaded value becomes an index, directly or by computation.
    after(&at("a"), &[true]);
    after("store @l[%i], %a", &[false]);
    after(&format!("%b = add %i, %a : i64\n{}", at("b")), &[true]);
    after(&format!("%b = load @l[%a] : i64\n{}", at("b")), &[true, true]);
    after("%b = load @l[%a] : i64\nstore @l[%i], %b", &[true, false]);
    // A loaded value decides a branch; a comparison of floats counts only if it selects an index.
    let under = |condition: &str| format!("{condition} : bool\nif %c {{\nstore @x[%i], %v\n}}");
    after(&under("%c = lt.s %a, %i"), &[true]);
    after(&under("%f = sitofp %a : f32\n%c = lt %f, %v"), &[false]);
    let chosen = "%f = sitofp %a : f32\n%c = lt %f, %v : bool\n%k = select %c, %i, %0 : i64\n";
    after(&format!("{chosen}{}", at("k")), &[true]);
    after("switch %a {\ncase 0 {\nstore @x[%i], %v\n}\ndefault {\n}\n}", &[true]);
    // Bounds of loops.
    for bounds in ["%a to %8 step %1", "%0 to %a step %1", "%0 to %8 step %a"] {
        after(&format!("for %c: i64 = {bounds} {{\nstore @x[%i], %v\n}}"), &[true]);
    }
    after(&format!("for %c: i64 = %a to %8 step %1 {{\n{}\n}}", at("c")), &[true]);
    // Carried values: the initial value and the yielded one, each apart from its neighbor's.
    let carried = |first: &str, second: &str, body: &str, index: &str| {
        format!(
            "%e, %g = for %c: i64 = %0 to %8 step %1 carry(%p: i64 = %{first}, %q: i64 = %{second}) {{\n{body}\n}}\n{index}"
        )
    };
    for (index, first, second) in [("e", true, false), ("g", false, true)] {
        let (index, same) = (at(index), "yield %p, %q");
        after(&carried("a", "i", same, &index), &[first]);
        after(&carried("i", "a", same, &index), &[second]);
        let yields = |values: &str| format!("%y = load @l[%i] : i64\nyield {values}");
        check_once(&carried("i", "i", &yields("%y, %q"), &index), &[first]);
        check_once(&carried("i", "i", &yields("%p, %y"), &index), &[second]);
    }
    for (index, first, second) in [("p", true, false), ("q", false, true)] {
        let inside = format!("{}\nyield %p, %q", at(index));
        after(&carried("a", "i", &inside, ""), &[first]);
        after(&carried("i", "a", &inside, ""), &[second]);
        let yields = |values: &str| format!("{}\n%y = load @l[%i] : i64\nyield {values}", at(index));
        check_once(&carried("i", "i", &yields("%y, %q"), ""), &[first]);
        check_once(&carried("i", "i", &yields("%p, %y"), ""), &[second]);
    }
    let looped = |initial: &str, condition: &str, body: &str| {
        format!("%e = while carry(%p: i64 = %{initial}) {{\n{condition}\nyield %c\n}} do {{\n{body}\n}}\n")
    };
    let short = "%c = lt.s %i, %8 : bool";
    after(&(looped("a", short, "yield %p") + &at("e")), &[true]);
    after(&(looped("a", short, "yield %p") + &at("i")), &[false]);
    after(&(looped("i", short, "yield %a") + &at("e")), &[true]);
    check_once(&looped("i", "%b = load @l[%i] : i64\n%c = lt.s %b, %8 : bool", "yield %p"), &[true]);
    // Values that branches yield.
    let either = |then: &str, or_else: &str| {
        format!(
            "%t = lt.s %i, %8 : bool\n%e = if %t : i64 {{\nyield %{then}\n}} else {{\nyield %{or_else}\n}}\n"
        )
    };
    after(&(either("a", "i") + &at("e")), &[true]);
    after(&(either("i", "a") + &at("e")), &[true]);
    after(&(either("i", "a") + &at("i")), &[false]);
    // A thread's own array holds what was loaded from elsewhere.
    let kept = |index: &str| format!("store @t[%0], %a\n%b = load @t[%8] : i64\n{}", at(index));
    after(&kept("b"), &[true, false]);
    after(&kept("i"), &[false, false]);
}

#[test]
fn charges_are_taken_where_iterations_are_long() {
    let poll = |iteration: u64, takes_fuel: bool| Poll { every: 1, takes_fuel, iteration, interval: 1 << 20 };
    // QUANTUM iterations of 256 take exactly one interval.
    assert_eq!(poll(256, true).charge(1), None);
    assert_eq!(poll(257, true).charge(1), Some(257));
    assert_eq!(poll(128, true).charge(2), None);
    assert_eq!(poll(129, true).charge(2), Some(258));
    assert_eq!(poll(1, false).charge(1), Some(1));
    assert_eq!(poll(1 << 20, true).charge(1), Some(1 << 20));
    assert_eq!(poll((1 << 20) + 1, true).charge(1), Some((1 << 20) + 1));
    assert_eq!(poll(u64::MAX, true).charge(u64::MAX), Some((1 << 20) + 1));
}

#[test]
fn loops_over_threads_are_charged() {
    let cpu = crate::backend::cpu::SAFETY;
    let check = |body: &str,
                 trust: Trust,
                 parameters: &Parameters,
                 threads: u64,
                 expect: Option<ThreadsCharge>| {
        let text = format!("vir 1\nkernel @k({PARAMS}) at 0x0 block(32) {{\n{body}\n}}");
        let module = validate(text::parse(&text).unwrap(), trust).unwrap();
        let kernel = &module.kernels()[0];
        let plan = SafetyPlan::of(kernel, trust, parameters).unwrap();
        let ops: Vec<_> = kernel.body().ops.iter().collect();
        assert_eq!(plan.charge_of_threads(&ops, threads, 8), expect, "{body}");
        assert_eq!((plan.is_guests(), plan.zeroes_arrays()), (trust == Trust::Guest, trust == Trust::Guest));
        assert_eq!(plan.interval(), parameters.interval as i64);
    };
    let store = "store @x[%i], %v";
    check(store, Trust::Guest, &cpu, 1024, Some(ThreadsCharge::All(16 * 1024)));
    // An atomic op costs 256, so 1024 threads cost exactly `in_loops`.
    check(ATOMIC, Trust::Guest, &cpu, 1024, Some(ThreadsCharge::All(1 << 18)));
    check(ATOMIC, Trust::Guest, &cpu, 1025, Some(ThreadsCharge::Each(256 * 8)));
    check(&format!("{ATOMIC}\n{store}"), Trust::Guest, &cpu, 1024, Some(ThreadsCharge::Each(272 * 8)));
    check(store, Trust::Trusted, &cpu, 1024, None);
    check(store, Trust::Guest, &ptx(), 1024, None);
}

/// `verify` rejects a plan whose bound, or a loop's cost, is one too small.
#[test]
fn the_bound_is_the_least_that_holds() {
    let store = "store @x[%i], %v";
    let branch = format!("%c = lt.s %j, %j : bool\nif %c {{\n{ATOMIC}\n}} else {{\n{store}\n}}");
    let bodies = [
        store.to_owned(),
        branch,
        constant("c", 10, 0, store),
        constant("c", 10, 4, store),
        around("c", "%j", 0, store),
        around("c", "%many", 64, store),
        format!("{}\n{}", constant("c", 4000, 0, store), constant("d", 100, 0, store)),
        ENDLESS.to_owned(),
    ];
    for body in bodies {
        let text = format!("vir 1\nkernel @k({PARAMS}) at 0x0 block(32) {{\n{body}\n}}");
        let module = validate(text::parse(&text).unwrap(), Trust::Guest).unwrap();
        let kernel = &module.kernels()[0];
        for parameters in [ptx(), crate::backend::cpu::SAFETY] {
            let mut plan = SafetyPlan::of(kernel, Trust::Guest, &parameters).unwrap();
            let loops: Vec<_> =
                (0..plan.decisions.len()).filter(|n| plan.decisions[*n].looped.is_some()).collect();
            // The plan counts one operation for each loop that `verify` does not.
            let bound = plan.bound;
            plan.bound -= 1 + loops.len() as u64;
            assert!(matches!(plan.verify(), Err(verify::Unsafe::Bound { .. })), "{body}");
            plan.bound = bound;
            // Reject a loop whose iteration is too cheap, or whose poll points are missing or too far apart.
            for number in loops {
                let known = plan.decisions[number].looped;
                let mut damaged = |change: &dyn Fn(&mut Loop)| {
                    plan.decisions[number].looped.iter_mut().for_each(change);
                    let verified = plan.verify();
                    plan.decisions[number].looped = known;
                    verified
                };
                damaged(&|_| ()).unwrap();
                damaged(&|planned| planned.iteration -= 1).unwrap_err();
                if let Some(Loop { poll: Some(_), unroll, .. }) = known {
                    damaged(&|planned| planned.poll.iter_mut().for_each(|poll| poll.every = 0)).unwrap_err();
                    let copies = match unroll {
                        Unroll::None => 1,
                        Unroll::Full(n) | Unroll::Partial(n) => n,
                    };
                    damaged(&|planned| planned.poll.iter_mut().for_each(|poll| poll.every = copies + 1))
                        .unwrap_err();
                }
            }
        }
    }
}
