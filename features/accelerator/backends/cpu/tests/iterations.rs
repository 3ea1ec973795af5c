//! Loops in which the threads of a block go through a row side by side, against the interpreter.

mod common;

use common::Machine;
use vm_ir::filetest::{Tolerance, compare};
use vm_ir::interp::{Argument, Launch, Limits, Tensor, run};
use vm_ir::{Scalar, Trust, ValidModule, text, validate};

/// What a loop looks like: the count's type, the step of the 64 threads' loop, and its bound below the row's end.
struct Shape {
    count: &'static str,
    step: u32,
    /// Is there a barrier, without which threads are run one by one?
    waits: bool,
}

/// Carries two numbers that change places, takes elements beside its own, and parts ways where they are odd.
fn kernel(shape: &Shape) -> ValidModule {
    let Shape { count, step, waits } = shape;
    let (number, bound) = match *count {
        "i64" => ("%low = sext %t : i64", "%n = extent @x, 0 : i64"),
        _ => ("%low = local_index : i32", "%wide = extent @x, 0 : i64\n  %n = trunc %wide : i32"),
    };
    let barrier = if *waits { "barrier.block" } else { "" };
    let source = format!(
        "vir 1\n
kernel @k(@x: view<i32, [?], read>, @y: view<i32, [?], write>, @z: view<i32, [?], write>) at 0x1000 block(64) {{
  %t = thread_id.x : i32
  {number}
  {bound}
  %one = const 1 : i32
  %seven = const 7 : i32
  %three = const 3 : {count}
  %zero = const 0 : i32
  %step = const {step} : {count}
  %p, %q = for %j: {count} = %low to %n step %step carry(%c: i32 = %t, %d: i32 = %seven) {{
    %v = load @x[%j] : i32
    %beside = add %j, %three : {count}
    %u = load @x[%beside] : i32
    %bit = and %v, %one : i32
    %odd = ne %bit, %zero : bool
    %w = if %odd : i32 {{
      %m = mul %v, %seven : i32
      %s = sub %m, %u : i32
      yield %s
    }} else {{
      yield %v
    }}
    %e = add %c, %w : i32
    store @y[%beside], %e
    yield %d, %e
  }}
  {barrier}
  %both = mul %p, %seven : i32
  %sum = add %both, %q : i32
  store @z[%t], %sum
}}
"
    );
    let module = text::parse(&source).unwrap_or_else(|error| panic!("{error}\n{source}"));
    validate(module, Trust::Guest).unwrap_or_else(|errors| panic!("{errors}\n{source}"))
}

fn launch(columns: usize) -> Launch {
    let tensor = |count: usize, of: &dyn Fn(usize) -> i32| {
        let bytes = (0..count).flat_map(|i| of(i).to_le_bytes()).collect();
        Argument::Tensor(Tensor { element: Scalar::I32, extents: vec![count as u64], bytes })
    };
    let x = tensor(columns, &|i| (i as i32).wrapping_mul(0x9e37_79b1u32 as i32) >> 7);
    let arguments = vec![x, tensor(columns, &|_| -1), tensor(64, &|_| -1)];
    Launch { kernel: "k".into(), grid: [1, 1, 1], arguments }
}

#[test]
fn as_on_the_interpreter() {
    let machines = Machine::all();
    let mut ran = 0;
    for count in ["i64", "i32"] {
        for step in [64, 65, 100, 128] {
            for waits in [true, false] {
                let module = kernel(&Shape { count, step, waits });
                for columns in [0, 5, 16, 63, 65, 79, 128, 200] {
                    let place = format!("{count} {step} {waits} {columns}");
                    let mut theirs = launch(columns);
                    run(&module, &mut theirs, &Limits::default()).unwrap_or_else(|e| panic!("{place}: {e}"));
                    for machine in &machines {
                        let mut ours = launch(columns);
                        assert_eq!(machine.run(&module, &mut ours, 1 << 40), Ok(0), "{place}");
                        for (got, wanted) in ours.arguments.iter().zip(&theirs.arguments) {
                            let (got, wanted) = (got.tensor().unwrap(), wanted.tensor().unwrap());
                            compare(got, wanted, Tolerance::Exact).unwrap_or_else(|e| panic!("{place}: {e}"));
                        }
                    }
                    ran += 1;
                }
            }
        }
    }
    assert_eq!(ran, 2 * 4 * 2 * 8);
}

/// Rounds are those of the thread that takes the most.
#[test]
fn rounds_are_counted_alike() {
    let machine = Machine::new();
    for waits in [true, false] {
        let module = kernel(&Shape { count: "i64", step: 64, waits });
        for (columns, iterations) in [(64 * 100, 100), (64 * 100 + 1, 101), (64 * 5000, 5000)] {
            let stopped = |given: u64| machine.run(&module, &mut launch(columns), given);
            assert_eq!(stopped(iterations), Ok(0), "{waits} {columns}");
            assert_eq!(stopped(iterations - 1), Ok(vm_jit::Guard::OUT_OF_FUEL), "{waits} {columns}");
        }
    }
}

/// Bounds that are uniform, but are held as one number for each thread: what a shuffle gives. A loop with a step below 1 runs
/// nothing, however the numbers are held; its accesses are not checked, as none is ever made.
#[test]
fn uniform_bounds_in_vectors() {
    let machines = Machine::all();
    let mut ran = 0;
    for count in ["i64", "i32"] {
        for (low, high) in [("zero", "bound"), ("bound", "most"), ("zero", "most"), ("bound", "bound")] {
            for step in ["-1", "0", "1", "3", "-64", "number"] {
                let step = match step {
                    "number" => format!("%step = sub %bound, %nine : {count}"),
                    step => format!("%step = const {step} : {count}"),
                };
                let source = format!(
                    "vir 1\n
kernel @k(@x: view<i32, [64], read>, @y: view<i32, [64], write>) at 0x1000 block(32) {{
  %t = thread_id.x : i32
  %id = global_id.x : i64
  %number = trunc %id : i32
  %wide = sext %number : i64
  %lane = const 5 : i32
  %of = shuffle %{from}, %lane : {count}
  %mask = const 15 : {count}
  %bound = and %of, %mask : {count}
  %zero = const 0 : {count}
  %nine = const 9 : {count}
  %most = const 20 : {count}
  {step}
  %seven = const 7 : i32
  %sum = for %i: {count} = %{low} to %{high} step %step carry(%c: i32 = %t) {{
    %v = load @x[%i] : i32
    %next = add %v, %c : i32
    store @y[%i], %seven
    yield %next
  }}
  %far = const 32 : i32
  %at = add %t, %far : i32
  store @y[%at], %sum
}}
",
                    from = if count == "i64" { "wide" } else { "number" },
                );
                let module = text::parse(&source).unwrap_or_else(|error| panic!("{error}\n{source}"));
                let module =
                    validate(module, Trust::Guest).unwrap_or_else(|errors| panic!("{errors}\n{source}"));
                let (mut theirs, place) = (launch(64), format!("{count} {low} {high} {step}"));
                theirs.arguments.pop();
                let given = theirs.clone();
                let limits = Limits { races: false, ..Limits::default() };
                run(&module, &mut theirs, &limits).unwrap_or_else(|e| panic!("{place}: {e}"));
                for machine in &machines {
                    let mut ours = given.clone();
                    assert_eq!(machine.run(&module, &mut ours, 1 << 20), Ok(0), "{place}");
                    for (got, wanted) in ours.arguments.iter().zip(&theirs.arguments) {
                        let (got, wanted) = (got.tensor().unwrap(), wanted.tensor().unwrap());
                        compare(got, wanted, Tolerance::Exact).unwrap_or_else(|e| panic!("{place}: {e}"));
                    }
                }
                ran += 1;
            }
        }
    }
    assert_eq!(ran, 2 * 4 * 6);
}
