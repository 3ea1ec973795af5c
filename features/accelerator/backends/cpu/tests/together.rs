//! Threads that are run together, where the code decides for all of them at once, against the interpreter: lanes that it
//! knows, sums that overflow, votes by one comparison, and loops that are checked before they begin.

mod common;

use common::Machine;
use common::large::same;
use vm_ir::filetest::Random;
use vm_ir::interp::{Argument, Launch, Limits, Tensor, run};
use vm_ir::{Scalar, Trust, text, validate};

/// A view's elements: whole numbers from −8 to 8, the same in every run.
fn view(element: Scalar, extents: &[u64]) -> Argument {
    let mut random = Random(7);
    let numbers = (0..extents.iter().product()).map(|_| (random.bits(Scalar::I32) % 17) as f64 - 8.0);
    Argument::Tensor(Tensor::from_f64s(element, extents, numbers))
}

fn number(scalar: Scalar, one: i64) -> Argument {
    Argument::Bits(one as u64 & scalar.mask())
}

/// Kernel `k` over so many blocks, as a guest's or as the host's own.
fn check(machines: &[Machine], source: &str, trust: Trust, blocks: u32, arguments: Vec<Argument>) {
    let module = text::parse(source).unwrap_or_else(|error| panic!("{error}\n{source}"));
    let valid = validate(module, trust).unwrap_or_else(|error| panic!("{error}\n{source}"));
    let launch = Launch { kernel: "k".into(), grid: [blocks, 1, 1], arguments };
    let mut theirs = launch.clone();
    run(&valid, &mut theirs, &Limits { races: false, ..Limits::default() })
        .unwrap_or_else(|error| panic!("{error}\n{source}"));
    for machine in machines {
        let mut ours = launch.clone();
        let result = machine.run(&valid, &mut ours, 1 << 40).and_then(|stop| match stop {
            0 => same(&ours, &theirs),
            word => Err(format!("stopped with {word:#x}")),
        });
        result.unwrap_or_else(|error| panic!("{trust:?} on {}: {error}\n{source}", machine.name()));
    }
}

/// Lanes of a warp that is shuffled in registers, for which a condition holds.
#[test]
fn known_lanes() {
    let machines = Machine::all();
    for (compare, bound) in [
        ("lt.s", 8),
        ("lt.s", 3),
        ("ge.s", 28),
        ("ge.s", 17),
        ("eq", 31),
        ("eq", 5),
        ("ne", 0),
        ("lt.s", 32),
        ("lt.s", 0),
        ("gt.s", 15),
    ] {
        let views = |n| vec![view(Scalar::F32, &[n]), view(Scalar::F32, &[128]), view(Scalar::I32, &[128])];
        for (trust, n) in [(Trust::Guest, 100), (Trust::Trusted, 128)] {
            check(
            &machines,
            &format!(
                "vir 1
kernel @k(@x: view<f32, [?], read>, @y: view<f32, [?], write>, @z: view<i32, [?], write>) at 0x1000 block(64) {{
  shared @s: f32[64]
  %i = global_id.x : i64
  %t = thread_id.x : i32
  %lane = lane_id : i32
  %n = extent @x, 0 : i64
  %in = lt.s %i, %n : bool
  %v = if %in : f32 {{
    %a = load @x[%i] : f32
    yield %a
  }} else {{
    %b = const 2.5 : f32
    yield %b
  }}
  %two = const 2 : i32
  %u = shuffle.up %v, %two : f32
  store @s[%t], %u
  %bound = const {bound} : i32
  %some = {compare} %lane, %bound : bool
  if %some {{
    %w = mul %u, %v : f32
    store @s[%t], %w
  }}
  %p, %q, %r = if %some : f32, i32, bool {{
    %c = add %u, %v : f32
    %d = mul %t, 3 : i32
    %e = lt %u, %v : bool
    yield %c, %d, %e
  }} else {{
    yield %v, %lane, %in
  }}
  %f, %g = if %some : f32, i64 {{
    yield %p, %i
  }} else {{
    %h = sub %u, %v : f32
    %j = add %i, 7 : i64
    yield %h, %j
  }}
  %own = load @s[%t] : f32
  %k = add %f, %own : f32
  %l = add %k, %p : f32
  %g4 = trunc %g : i32
  %q1 = add %q, %g4 : i32
  %q2 = select %r, %q1, %two : i32
  store @y[%i], %l
  store @z[%i], %q2
}}
"
),trust, 2, views(n));
        }
    }
}

/// Sums of four bytes that overflow within some threads that are run together, within none, or that are below 0.
#[test]
fn sums_that_overflow() {
    let machines = Machine::all();
    for (op, by) in [
        ("add", 0i64),
        ("add", -7),
        ("add", 2_147_483_640),
        ("add", 2_147_483_600),
        ("add", -2_147_483_648),
        ("sub", 5),
        ("sub", -2_147_483_645),
        ("sub", 2_147_483_647),
    ] {
        check(
            &machines,
            &format!(
                "vir 1
kernel @k(%by: i32, @x: view<i32, [?], read>, @y: view<i32, [?], write>, @z: view<i64, [?], write>) at 0x1000 block(64) {{
  %t = thread_id.x : i32
  %i = global_id.x : i64
  %sum = {op} %t, %by : i32
  %j = sext %sum : i64
  %n = extent @x, 0 : i64
  %below = lt.s %j, %n : bool
  %v = if %below : i32 {{
    %a = load @x[%j] : i32
    yield %a
  }} else {{
    %b = const 9 : i32
    yield %b
  }}
  store @y[%i], %v
  store @z[%i], %j
}}
"
),Trust::Guest, 2, vec![number(Scalar::I32, by), view(Scalar::I32, &[40]), view(Scalar::I32, &[128]), view(Scalar::I64, &[128])]);
    }
}

/// Threads that differ along x and agree along y, on what is made of both conditions.
#[test]
fn votes() {
    let machines = Machine::all();
    for (op, x, y) in
        [("and", 20, 3), ("and", 16, 8), ("and", 0, 3), ("or", 5, 2), ("or", 32, 0), ("xor", 7, 4)]
    {
        for compare in ["lt.s", "le.s", "gt.s", "ge.s", "eq", "ne"] {
            check(
                &machines,
                &format!(
                    "vir 1
kernel @k(%bound: i32, @y: view<i32, [8, 32], write>) at 0x1000 block(32, 8) {{
  shared @s: i32[32, 9]
  %x0 = thread_id.x : i32
  %y0 = thread_id.y : i32
  %x = sext %x0 : i64
  %y = sext %y0 : i64
  %rows = const {y} : i32
  %a = {compare} %x0, %bound : bool
  %b = lt.s %y0, %rows : bool
  %c = {op} %a, %b : bool
  %v = if %c : i32 {{
    %d = mul %x0, 3 : i32
    yield %d
  }} else {{
    yield %y0
  }}
  store @s[%x0, %y0], %v
  barrier.block
  %past = add %y0, 5 : i32
  %w = load @s[%x0, %past] : i32
  %u = load @s[%x0, %y0] : i32
  %t = add %w, %u : i32
  store @y[%y, %x], %t
}}
"
                ),
                Trust::Guest,
                1,
                vec![number(Scalar::I32, x), view(Scalar::I32, &[8, 32])],
            );
        }
    }
}

/// Loops whose indices are in bounds throughout, or leave them by what they don't change or by their count.
#[test]
fn loops_that_are_checked_ahead() {
    let machines = Machine::all();
    for (low, high, row, inner) in [
        (0, 12, 0, 12),
        (0, 12, 1, 9),
        (-3, 12, 1, 12),
        (5, 5, 0, 12),
        (7, 2, 0, 12),
        (0, 12, 3, 12),
        (0, 12, -1, 12),
        (2, 11, 2, 20),
        (0, 6000, 0, 6000),
        (0, 6000, 1, 4097),
    ] {
        for columns in [16, 13, 40] {
            check(
                &machines,
                "vir 1
kernel @k(%low: i64, %high: i64, %row: i64, @x: view<f32, [?, ?], read>, @y: view<f32, [?, ?], read>, @z: view<f32, [?], write>) at 0x1000 block(32) {
  %t0 = thread_id.x : i32
  %t = sext %t0 : i64
  %zero = const 0.0 : f32
  %sum = for %i: i64 = %low to %high step 1 carry(%s: f32 = %zero) {
    %u = load @x[%row, %i] : f32
    %v = load @y[%i, %t] : f32
    %w = fma %u, %v, %s : f32
    yield %w
  }
  %again = for %j: i64 = %low to %high step 1 carry(%r: f32 = %sum) {
    %p = load @y[%j, %row] : f32
    %q = add %p, %r : f32
    yield %q
  }
  store @z[%t], %again
}
",Trust::Guest, 1, vec![number(Scalar::I64, low), number(Scalar::I64, high), number(Scalar::I64, row), view(Scalar::F32, &[3, inner]), view(Scalar::F32, &[inner, columns]), view(Scalar::F32, &[64])]);
        }
    }
}

/// A loop takes as much fuel as it has iterations, whichever way it is run.
#[test]
fn fuel() {
    let source = "vir 1
kernel @k(%high: i64, @x: view<f32, [?], read>, @z: view<f32, [?], write>) at 0x1000 block(16) {
  %t0 = thread_id.x : i32
  %t = sext %t0 : i64
  %zero = const 0.0 : f32
  %half = const 2500 : i64
  %rest = sub %high, %half : i64
  %one = for %i: i64 = 0 to %half step 1 carry(%s: f32 = %zero) {
    %u = load @x[%i] : f32
    %w = add %u, %s : f32
    yield %w
  }
  %two = for %j: i64 = 0 to %rest step 1 carry(%r: f32 = %one) {
    %v = load @x[%j] : f32
    %q = add %v, %r : f32
    yield %q
  }
  store @z[%t], %two
}
";
    let module = text::parse(source).unwrap();
    let arguments = vec![number(Scalar::I64, 5000), view(Scalar::F32, &[6000]), view(Scalar::F32, &[16])];
    let launch = Launch { kernel: "k".into(), grid: [1, 1, 1], arguments };
    let valid = validate(module, Trust::Guest).unwrap();
    for machine in Machine::all() {
        // The first loop is known to be short, so it takes none.
        for (fuel, wanted) in [(2500, 0), (2499, vm_jit::Guard::OUT_OF_FUEL), (1 << 40, 0)] {
            let stop = machine.run(&valid, &mut launch.clone(), fuel).unwrap();
            assert_eq!(stop, wanted, "fuel {fuel} on {}", machine.name());
        }
    }
}

/// Indices that count from the end if they are below 0, as Python has them: some never are, and some are.
#[test]
fn indices_from_the_end() {
    let machines = Machine::all();
    for (ty, sign, before) in [("i64", 63, 0), ("i64", 63, -40), ("i32", 31, 0), ("i32", 31, -70)] {
        let (own, wide) = match ty {
            "i64" => ("global_id.x", "add %from, 0"),
            _ => ("thread_id.x", "sext %from"),
        };
        check(
            &machines,
            &format!(
                "vir 1
kernel @k(@x: view<i8, [?], read, align 16>, @y: view<f32, [?], write>, %n: {ty}) at 0x1000 block(64) {{
  %own = {own} : {ty}
  %i = add %own, {before} : {ty}
  %sign = shr.s %i, {sign} : {ty}
  %end = and %sign, %n : {ty}
  %from = add %end, %i : {ty}
  %wide = {wide} : i64
  %at = mul %wide, 4 : i64
  %v = load @x[%at] : f32
  %to = global_id.x : i64
  store @y[%to], %v
}}
"
            ),
            Trust::Guest,
            2,
            vec![view(Scalar::I8, &[4 * 150]), view(Scalar::F32, &[128]), Argument::Bits(150)],
        );
    }
}

/// Loops over neighbouring elements by bytes, as programs of grids have them: threads that leave one by one or all at once, numbers that
/// overflow in some of them on the way, steps back, and what begins at an address of the program's.
#[test]
fn loops_over_rows_of_bytes() {
    let machines = Machine::all();
    let most = i64::from(i32::MAX);
    // The number's type, what comes before it, its step, how it is compared with a bound, and bytes from an element to the next.
    let cases = [
        ("i32", 0, "add", 64, "lt.s", 500, 4),
        ("i32", 0, "add", 64, "lt.s", 487, 4),
        ("i32", 0, "add", 1, "le.s", 70, 4),
        ("i32", 400, "sub", 64, "gt.s", 3, 4),
        ("i32", most - 100, "add", 64, "ge.s", 9, 4),
        ("i32", most - 40, "add", 7, "ge.s", 9, 4),
        ("i32", -most - 1, "sub", 3, "lt.s", 0, 4),
        ("i32", 0, "add", 64, "ne", 320, 8),
        ("i64", 0, "add", 64, "lt.s", 500, 4),
        ("i64", 0, "add", 64, "lt.u", 487, 4),
        ("i64", 3, "add", 61, "lt.s", 500, 8),
        ("i64", i64::MAX - 90, "add", 33, "gt.s", 100, 4),
        ("i64", i64::MIN, "sub", 1, "lt.s", 100, 4),
    ];
    for (ty, before, op, by, compare, bound, size) in cases {
        for (trust, pointer) in [(Trust::Guest, 1i64 << 46), (Trust::Guest, i64::MAX - 50), (Trust::Guest, 0)]
        {
            let (wide, scalar) = match ty {
                "i32" => ("sext %i : i64", Scalar::I32),
                _ => ("add %i, 0 : i64", Scalar::I64),
            };
            let arguments = || {
                vec![
                    view(Scalar::I8, &[4009]),
                    view(Scalar::I8, &[4009]),
                    view(Scalar::F32, &[64]),
                    number(scalar, before),
                    number(scalar, by),
                    number(scalar, bound),
                    number(Scalar::I64, pointer),
                ]
            };
            check(
                &machines,
                &format!(
                    "vir 1
kernel @k(@x: view<i8, [?], read, align 16>, @y: view<i8, [?], readwrite, align 16>, @z: view<f32, [?], write>, %before: {ty}, %by: {ty}, %bound: {ty}, %pointer: i64) at 0x1000 block(64) {{
  %t = thread_id.x : i32
  %t64 = sext %t : i64
  %own = {own} : {ty}
  %first = add %before, %own : {ty}
  %zero = const 0.0 : f32
  %none = const 0 : i32
  %a, %b, %sum, %rounds = while carry(%more: bool = true, %i: {ty} = %first, %s: f32 = %zero, %n: i32 = %none) {{
    yield %more
  }} do {{
    %at = {wide}
    %from = mul %at, {size} : i64
    %p = add %pointer, %from : i64
    %q = sub %p, %pointer : i64
    %v = load @x[%q] : f32
    %next4 = add %p, 4 : i64
    %r = sub %next4, %pointer : i64
    %w = load @x[%r] : i32
    %f = sitofp %w : f32
    %g = fma %v, 2.0, %f : f32
    store @y[%q], %g
    %more1 = {compare} %i, %bound : bool
    %u = {op} %i, %by : {ty}
    %m = add %n, 1 : i32
    %few = lt.s %m, 9 : bool
    %again = and %more1, %few : bool
    %total = add %s, %g : f32
    yield %again, %u, %total, %m
  }}
  %count = sitofp %rounds : f32
  %both = add %sum, %count : f32
  %fit = {last} : f32
  %all = add %both, %fit : f32
  store @z[%t64], %all
}}
",
                    own = if ty == "i32" { "add %t, 0" } else { "sext %t" },
                    last = "sitofp %b",
                ),
                trust,
                1,
                arguments(),
            );
        }
    }
}

/// An outer index puts the row of a whole warp out of bounds. The store must not change what a load out of bounds returns, nor the
/// number of the next block. The load must return zeros.
#[test]
fn dropped_rows_of_whole_warps() {
    let machines = Machine::all();
    let stored = [("i32", "%p"), ("i64", "%wide"), ("f32", "%float")];
    for ((store, value), load) in
        stored.into_iter().flat_map(|one| ["i64", "i32", "f32"].map(|load| (one, load)))
    {
        let source = format!(
            "vir 1
kernel @k(@m: view<{load}, [?, 32], read>, @y: view<{store}, [?, 32], readwrite>, %row: i32, @o: view<{load}, [?, 32], write>, @seen: view<i32, [?, 32], write>) at 0x0 block(32) {{
  %t = thread_id.x : i32
  %b = block_id.x : i32
  %c = block_id.y : i32
  %x = shuffle.xor %t, 1 : i32
  %p = add %x, 1000 : i32
  %wide = sext %p : i64
  %float = sitofp %p : f32
  %out = add %row, %b : i32
  store @y[%out, %t], {value}
  %v = load @m[%out, %t] : {load}
  store @o[%b, %t], %v
  %sum = add %b, %c : i32
  store @seen[%b, %t], %sum
}}
"
        );
        let scalar = |name: &str| match name {
            "i32" => Scalar::I32,
            "i64" => Scalar::I64,
            _ => Scalar::F32,
        };
        // Each thread of the device runs several of 100 blocks.
        for row in [-1000, 4, i64::from(i32::MAX), i64::from(i32::MIN)] {
            let arguments = vec![
                view(scalar(load), &[4, 32]),
                view(scalar(store), &[4, 32]),
                number(Scalar::I32, row),
                view(scalar(load), &[100, 32]),
                view(Scalar::I32, &[100, 32]),
            ];
            check(&machines, &source, Trust::Guest, 100, arguments);
        }
    }
}

/// The same for accesses by bytes that are known to be within the view, but may be misaligned.
#[test]
fn dropped_rows_of_whole_warps_by_bytes() {
    let machines = Machine::all();
    let source = "vir 1
kernel @k(@m: view<i8, [272], read, align 16>, @y: view<i8, [272], readwrite, align 16>, %few: i32 in [0, 8], @o: view<i64, [?, 32], write>, @seen: view<i32, [?, 32], write>) at 0x0 block(32) {
  %t = thread_id.x : i32
  %b = block_id.x : i32
  %x = shuffle.xor %t, 1 : i32
  %p = add %x, 1000 : i32
  %wide = sext %p : i64
  %eight = mul %t, 8 : i32
  %at = add %eight, %few : i32
  store @y[%at], %wide
  %v = load @m[%at] : i64
  store @o[%b, %t], %v
  store @seen[%b, %t], %b
}
";
    for few in [0, 1, 4, 7, 8] {
        let arguments = vec![
            view(Scalar::I8, &[272]),
            view(Scalar::I8, &[272]),
            number(Scalar::I32, few),
            view(Scalar::I64, &[100, 32]),
            view(Scalar::I32, &[100, 32]),
        ];
        check(&machines, source, Trust::Guest, 100, arguments);
    }
}
