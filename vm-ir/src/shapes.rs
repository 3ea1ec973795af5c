//! Kernels that are as large as asked for and of one shape each, to see how the cost of what goes through a guest's
//! module grows with it. Each shape is what some analysis likes least.

use std::fmt::Write;

/// A shape: its name, and a module's text of about that number of ops.
pub type Shape = (&'static str, fn(usize) -> String);

/// All shapes.
pub const SHAPES: &[Shape] = &[
    ("ifs on one condition", ifs_on_one_condition),
    ("ifs that yield vectors", ifs_that_yield_vectors),
    ("ifs that swap vectors", ifs_that_swap_vectors),
    ("nested ifs", nested_ifs),
    ("a tree of gathers", tree_of_gathers),
    ("a chain of sums", chain_of_sums),
    ("a chain of vectors that are rotated", rotated_vectors),
    ("a chain of f16 that is rounded", rounded_halves),
    ("a chain of indices", chain_of_indices),
    ("a chain of extremes", chain_of_extremes),
    ("one value used often", one_value_used_often),
    ("switches", switches),
    ("loops that rotate what they carry", rotating_loops),
    ("nested loops that rotate what they carry", nested_rotating_loops),
    ("loops that carry vectors", loops_that_carry_vectors),
    ("values that live through ifs", values_through_ifs),
    ("loops that negate", negating_loops),
    ("unrolled nests", unrolled_nests),
    ("shared arrays that are gathered", gathered_arrays),
    ("views and dimensions", views_and_dimensions),
    ("barriers that all values cross", barriers),
    ("many kernels", many_kernels),
];

/// A kernel's text. `%t` is the thread, `%i` its number in the grid, `%n` an extent, `%f` a float; `%0` and `%1` numbers.
fn kernel(name: &str, head: &str, shared: &str, body: &str) -> String {
    format!(
        "kernel @{name}(@x: view<f32, [?], read>, @y: view<f32, [?], readwrite>, @w: view<i64, [?], readwrite>, %f: f32) \
         at 0x1000 {head} {{\n{shared}%t = thread_id.x : i32\n%i = global_id.x : i64\n%n = extent @x, 0 : i64\n\
         %zero = const 0 : i64\n%one = const 1 : i64\n%z = const 0 : i32\n%few = const 3 : i32\n%o = const 1 : i32\n\
         {body}}}\n"
    )
}

fn one(body: &str) -> String {
    format!("vir 1\n{}", kernel("k", "block(64)", "", body))
}

/// A condition of eight comparisons, each of a sum of eight sums that have it on both sides.
fn ifs_on_one_condition(size: usize) -> String {
    let mut body = String::from("%s0 = trunc %i : i32\n");
    let _ = writeln!(body, "%bits = const 65535 : i32\n%p0 = and %s0, %bits : i32");
    for n in 1..9 {
        let _ = writeln!(body, "%p{n} = add %p{}, %p{} : i32", n - 1, n - 1);
    }
    let _ = writeln!(body, "%c0 = lt.s %p8, %few : bool");
    for n in 1..9 {
        let _ = writeln!(body, "%c{n} = and %c{}, %c{} : bool", n - 1, n - 1);
    }
    (0..size).for_each(|_| body.push_str("if %c8 {\n}\n"));
    one(&body)
}

fn ifs_yielding(size: usize, ty: &str, swap: bool) -> String {
    let mut body = format!("%c = lt.s %i, %n : bool\n%v = vec.splat %f : {ty}\n");
    let (mut known, list) = (vec!["%v".to_owned(); 64], |names: &[String]| names.join(", "));
    for n in 0..size.div_ceil(64) {
        let results: Vec<String> = (0..64).map(|i| format!("%r{n}x{i}")).collect();
        let types = vec![ty; 64].join(", ");
        let mut other = known.clone();
        if swap {
            other.rotate_left(1);
        }
        let _ = writeln!(
            body,
            "{} = if %c : {types} {{\nyield {}\n}} else {{\nyield {}\n}}",
            list(&results),
            list(&known),
            list(&other)
        );
        known = results;
    }
    for (i, value) in known.iter().enumerate() {
        let _ = writeln!(body, "%at{i} = const {i} : i64\nstore @y[%at{i}], {value}");
    }
    one(&body)
}

fn ifs_that_yield_vectors(size: usize) -> String {
    ifs_yielding(size, "vec4<f32>", false)
}

fn ifs_that_swap_vectors(size: usize) -> String {
    ifs_yielding(size, "vec4<f32>", true)
}

/// Conditions that threads do not agree on, as deep as may be.
fn nested_ifs(size: usize) -> String {
    let depth = 30;
    let mut body = String::from("%c = lt.s %i, %n : bool\n");
    for level in 0..depth {
        for n in 0..size / depth {
            let _ = writeln!(body, "%a{level}x{n} = add %f, %f : f32");
        }
        body.push_str("if %c {\n");
    }
    body.push_str("store @y[%i], %f\n");
    (0..depth).for_each(|_| body.push_str("}\n"));
    one(&body)
}

/// A gather in each leaf of a tree of `if`s.
fn tree_of_gathers(size: usize) -> String {
    fn tree(leaves: usize, body: &mut String) {
        if leaves <= 1 {
            body.push_str("cluster.gather @s, %g\n");
            return;
        }
        body.push_str("if %c {\n");
        tree(leaves / 2, body);
        body.push_str("} else {\n");
        tree(leaves - leaves / 2, body);
        body.push_str("}\n");
    }
    let mut body = String::from("%c = lt.s %n, %one : bool\n%g = warp.add %f : f32\n");
    tree(size / 2, &mut body);
    format!("vir 1\n{}", kernel("k", "block(64) cluster(2)", "shared @s: f32[4]\n", &body))
}

fn chain_of_sums(size: usize) -> String {
    let mut body = String::from("%a0 = load @x[%i] : f32\n");
    for n in 1..=size {
        let _ = writeln!(body, "%a{n} = add %a{}, %f : f32", n - 1);
    }
    let _ = writeln!(body, "store @y[%i], %a{size}");
    one(&body)
}

/// Which the machine has no vectors for: two of 16 numbers of 64 bits.
fn rotated_vectors(size: usize) -> String {
    let mut body = String::from("%r0 = load @w[%zero] : vec16<i64>\n%r1 = load @w[%one] : vec16<i64>\n");
    for n in 1..=size {
        let _ = writeln!(body, "%r{} = rotl %r{n}, %r{} : vec16<i64>", n + 1, n - 1);
    }
    let _ = writeln!(body, "store @w[%zero], %r{}", size + 1);
    one(&body)
}

/// By 256 threads; each op is legalised into many.
fn rounded_halves(size: usize) -> String {
    let mut body = String::from("%a0 = fpconv %f : f16\n%b = load @x[%i] : f32\n%c = fpconv %b : f16\n");
    for n in 1..=size {
        let _ = writeln!(body, "%a{n} = fma %a{}, %c, %c : f16", n - 1);
    }
    let _ = writeln!(body, "%r = fpconv %a{size} : f32\nstore @y[%i], %r");
    format!("vir 1\n{}", kernel("k", "block(256)", "", &body))
}

/// Each index is the one before and one more, and in a comparison.
fn chain_of_indices(size: usize) -> String {
    let mut body = String::from("%a0 = and %i, %n : i64\n");
    for n in 1..=size / 4 {
        let _ = writeln!(
            body,
            "%a{n} = add %a{}, %one : i64\n%c{n} = lt.s %a{n}, %n : bool\nif %c{n} {{\nstore @y[%a{n}], %f\n}}",
            n - 1
        );
    }
    one(&body)
}

/// Of which it is asked at the end whether the sign of a zero matters, and at the beginning whether they may be NaN.
fn chain_of_extremes(size: usize) -> String {
    let mut body = String::from("%a0 = load @x[%i] : f32\n");
    for n in 1..=size {
        let _ = writeln!(body, "%a{n} = {} %a{}, %f : f32", ["max", "maximum"][n % 2], n - 1);
    }
    let _ = writeln!(body, "store @y[%i], %a{size}");
    one(&body)
}

fn one_value_used_often(size: usize) -> String {
    let mut body = String::from("%a = load @x[%i] : f32\n");
    for n in 0..size / 2 {
        let _ = writeln!(body, "%b{n} = mul %a, %a : f32\nstore @y[%i], %b{n}");
    }
    one(&body)
}

fn switches(size: usize) -> String {
    let mut body = String::new();
    for n in 0..size.div_ceil(256) {
        let _ = writeln!(body, "%r{n} = switch %t : f32 {{");
        for case in 0..255.min(size) {
            let _ = writeln!(body, "case {case} {{\n%v{n}x{case} = add %f, %f : f32\nyield %v{n}x{case}\n}}");
        }
        let _ = writeln!(body, "default {{\nyield %f\n}}\n}}\nstore @y[%i], %r{n}");
    }
    one(&body)
}

/// The head of a loop that carries 32 values, which it hands one place on in each round.
fn rotating(n: usize, initial: &str) -> (String, String) {
    let carried: Vec<String> = (0..32).map(|i| format!("%k{n}x{i}")).collect();
    let results: Vec<String> = (0..32).map(|i| format!("%r{n}x{i}")).collect();
    let carry: Vec<String> = carried.iter().map(|name| format!("{name}: i32 = {initial}")).collect();
    let mut yields = carried.clone();
    yields.rotate_left(1);
    let head = format!(
        "{} = for %j{n}: i32 = %z to %few step %o carry ({}) {{\n",
        results.join(", "),
        carry.join(", ")
    );
    (head, format!("yield {}\n}}\n", yields.join(", ")))
}

fn rotating_loops(size: usize) -> String {
    let mut body = String::new();
    for n in 0..size.div_ceil(32) {
        let (head, tail) = rotating(n, "%t");
        body.push_str(&head);
        let _ = writeln!(body, "%s{n} = sub %z, %k{n}x0 : i32\n%m{n} = max.s %s{n}, %k{n}x1 : i32");
        body.push_str(&tail.replace(&format!("%k{n}x0\n"), &format!("%m{n}\n")));
    }
    one(&body)
}

fn nested_rotating_loops(size: usize) -> String {
    let depth = 30;
    let mut body = String::new();
    let nests = size.div_ceil(depth * 32);
    for nest in 0..nests {
        let mut tails = Vec::new();
        for level in 0..depth {
            let n = nest * depth + level;
            let (head, tail) = rotating(n, "%t");
            body.push_str(&head);
            let _ = writeln!(body, "%s{n} = sub %z, %k{n}x0 : i32");
            tails.push(tail.replace(&format!("%k{n}x0\n"), &format!("%s{n}\n")));
        }
        tails.iter().rev().for_each(|tail| body.push_str(tail));
    }
    one(&body)
}

/// Loops that carry 32 vectors, each of which is changed, one loop behind the other.
fn loops_that_carry_vectors(size: usize) -> String {
    let (ops, ty) = (32, "vec4<f32>");
    let mut body = format!("%v = vec.splat %f : {ty}\n");
    let mut known = vec!["%v".to_owned(); ops];
    for n in 0..size.div_ceil(ops) {
        let names = |kind: &str| (0..ops).map(|i| format!("%{kind}{n}x{i}")).collect::<Vec<_>>();
        let (results, carried, next) = (names("r"), names("k"), names("s"));
        let carry: Vec<String> =
            carried.iter().zip(&known).map(|(name, first)| format!("{name}: {ty} = {first}")).collect();
        let _ = writeln!(
            body,
            "{} = for %j{n}: i32 = %z to %few step %o carry ({}) {{",
            results.join(", "),
            carry.join(", ")
        );
        for i in 0..ops {
            let _ = writeln!(body, "{} = add {}, {} : {ty}", next[i], carried[i], carried[(i + 1) % ops]);
        }
        let _ = writeln!(body, "yield {}\n}}", next.join(", "));
        known = results;
    }
    for (i, value) in known.iter().enumerate() {
        let _ = writeln!(body, "%at{i} = const {i} : i64\nstore @y[%at{i}], {value}");
    }
    one(&body)
}

/// Values that are all loaded before the first `if` and stored behind the last.
fn values_through_ifs(size: usize) -> String {
    let count = size / 4;
    let mut body = String::from("%c = lt.s %n, %one : bool\n");
    for n in 0..count {
        let _ = writeln!(body, "%v{n} = load @x[%i] : f32");
    }
    (0..size / 4).for_each(|_| body.push_str("if %c {\nstore @y[%i], %f\n}\n"));
    for n in 0..count {
        let _ = writeln!(body, "store @y[%i], %v{n}");
    }
    one(&body)
}

/// Loops that carry 32 values, each of which comes of all that the round computes.
fn negating_loops(size: usize) -> String {
    let ops = 32;
    let mut body = String::new();
    for n in 0..size.div_ceil(ops + 32) {
        let (head, _) = rotating(n, "%t");
        body.push_str(&head);
        let _ = writeln!(body, "%a{n}x0 = neg %k{n}x0 : i32");
        for i in 1..=ops {
            let _ = writeln!(body, "%a{n}x{i} = xor %a{n}x{}, %k{n}x{} : i32", i - 1, i - 1);
        }
        let yields: Vec<String> = (0..32).map(|i| format!("%a{n}x{}", ops - i)).collect();
        let _ = writeln!(body, "yield {}\n}}", yields.join(", "));
    }
    one(&body)
}

fn unrolled_nests(size: usize) -> String {
    let mut body = String::new();
    for nest in 0..size.div_ceil(8) {
        for level in 0..4 {
            let _ = writeln!(body, "for %j{nest}x{level}: i32 = %z to %few step %o unroll 256 {{");
        }
        let _ = writeln!(body, "store @y[%i], %f\n}}\n}}\n}}\n}}");
    }
    one(&body)
}

/// Many arrays, each gathered first and in the depth of a nest.
fn gathered_arrays(size: usize) -> String {
    let depth = 30;
    let arrays = 64;
    let shared: String = (0..arrays).map(|n| format!("shared @s{n}: f32[4]\n")).collect();
    let mut body = String::from("%c = lt.s %n, %one : bool\n%g = warp.add %f : f32\n");
    (0..depth).for_each(|_| body.push_str("if %c {\n"));
    for n in 0..arrays {
        let _ = writeln!(body, "cluster.gather @s{n}, %g");
    }
    for n in 0..size {
        let _ = writeln!(body, "%a{n} = load @s{}[%z] : f32", n % arrays);
    }
    (0..depth).for_each(|_| body.push_str("}\n"));
    format!("vir 1\n{}", kernel("k", "block(64) cluster(2)", &shared, &body))
}

/// Accesses to views of four dimensions, by a number that is below all of their extents.
fn views_and_dimensions(size: usize) -> String {
    let mut params: Vec<String> =
        (0..60).map(|n| format!("@v{n}: view<f32, [?, ?*4, ?*2, ?], readwrite>")).collect();
    params.push("%f: f32".to_owned());
    let mut body = String::from("%i = global_id.x : i64\n");
    let mut depth = 0;
    for n in 0..28 {
        let _ = writeln!(
            body,
            "%n{n} = extent @v{}, {} : i64\n%c{n} = lt.s %i, %n{n} : bool\nif %c{n} {{",
            n % 60,
            n % 4
        );
        depth += 1;
    }
    for n in 0..size / 2 {
        let view = n % 60;
        let _ = writeln!(
            body,
            "%a{n} = load @v{view}[%i, %i, %i, %i] : f32\nstore @v{view}[%i, %i, %i, %i], %a{n}"
        );
    }
    (0..depth).for_each(|_| body.push_str("}\n"));
    format!("vir 1\nkernel @k({}) at 0x1000 block(64) {{\n{body}}}\n", params.join(", "))
}

/// Each part adds to values that every part before it has made.
fn barriers(size: usize) -> String {
    let kept = 16;
    let mut body = String::new();
    for i in 0..kept {
        let _ = writeln!(body, "%p0x{i} = load @x[%i] : f32");
    }
    let parts = size / (kept + 1);
    for n in 1..=parts {
        body.push_str("barrier.block\n");
        for i in 0..kept {
            let _ = writeln!(body, "%p{n}x{i} = add %p{}x{i}, %p{}x{} : f32", n - 1, n - 1, (i + 1) % kept);
        }
    }
    for i in 0..kept {
        let _ = writeln!(body, "store @y[%i], %p{parts}x{i}");
    }
    one(&body)
}

fn many_kernels(size: usize) -> String {
    let count = 64.min(size);
    let mut text = String::from("vir 1\n");
    for n in 0..count {
        let mut body = String::from("%a0 = load @x[%i] : f32\n");
        for i in 1..=size / count {
            let _ = writeln!(body, "%a{i} = add %a{}, %f : f32", i - 1);
        }
        let _ = writeln!(body, "store @y[%i], %a{}", size / count);
        text.push_str(&kernel(&format!("k{n}"), "block(64)", "", &body));
    }
    text
}
