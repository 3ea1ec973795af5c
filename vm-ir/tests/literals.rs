//! What only text has: literals where an op takes a value, and atomics whose old value nobody wants. Each is spelled out in
//! canonical text.

use vm_ir::binary::{Lines, decode, encode};
use vm_ir::{Trust, text, validate};

const HEAD: &str = "kernel @k(@x: view<f32, [?, ?], readwrite>, @h: view<i32, [?], readwrite>, %n: i32, %f: f32) at 0x0 block(32) {\n  shared @s: f16[4]\n";

fn source(body: &[&str]) -> String {
    format!("vir 1\n\n{HEAD}{}}}\n", body.iter().map(|line| format!("  {line}\n")).collect::<String>())
}

#[test]
fn literals_become_constants() {
    let check = |written: &[&str], canonical: &[&str]| {
        let module = text::parse(&source(written))
            .unwrap_or_else(|error| panic!("{}", error.render(&source(written))));
        let printed = text::print(&module);
        assert_eq!(printed, source(canonical), "{written:?}");
        assert_eq!(text::parse(&printed).as_ref(), Ok(&module), "{written:?}");
        assert_eq!(decode(&encode(&module, Lines::Keep)).as_ref(), Ok(&module), "{written:?}");
        validate(module, Trust::Guest).unwrap_or_else(|errors| panic!("{}", errors.render(&source(written))));
    };
    // The type of the result, of the other operand, of the element, of an index; a vector has it in every lane.
    check(&["%a = add %n, -1 : i32"], &["%2 = const -1 : i32", "%a = add %n, %2 : i32"]);
    check(&["%a = lt.s 3, %n : bool"], &["%2 = const 3 : i32", "%a = lt.s %2, %n : bool"]);
    check(
        &["%v = vec.splat 0.5 : vec4<f32>", "%w = fma %v, 2, %v : vec4<f32>"],
        &[
            "%2 = const 0.5 : f32",
            "%v = vec.splat %2 : vec4<f32>",
            "%4 = const 2.0 : vec4<f32>",
            "%w = fma %v, %4, %v : vec4<f32>",
        ],
    );
    check(
        &["%a = load @x[%n, 0] : f32", "store @s[3], 1"],
        &[
            "%2 = const 0 : i64",
            "%a = load @x[%n, %2] : f32",
            "%4 = const 3 : i64",
            "%5 = const 1.0 : f16",
            "store @s[%4], %5",
        ],
    );
    check(
        &["%a = select true, %f, -inf : f32", "%c = shuffle.xor %f, 0x10 : f32"],
        &[
            "%2 = const true : bool",
            "%3 = const -inf : f32",
            "%a = select %2, %f, %3 : f32",
            "%5 = const 16 : i32",
            "%c = shuffle.xor %f, %5 : f32",
        ],
    );
    check(&["%a = maximum %f, nan : f32"], &["%2 = const 0x7fc00000 : f32", "%a = maximum %f, %2 : f32"]);
    // The numbers of an op are no operands.
    check(
        &[
            "%v = vec.make 1, %f : vec2<f32>",
            "%w = vec.insert %v, 2, 1 : vec2<f32>",
            "%e = extent @x, 1 : i64",
        ],
        &[
            "%2 = const 1.0 : f32",
            "%v = vec.make %2, %f : vec2<f32>",
            "%4 = const 2.0 : f32",
            "%w = vec.insert %v, %4, 1 : vec2<f32>",
            "%e = extent @x, 1 : i64",
        ],
    );
    // One for equal ones of one type, as long as it is visible.
    check(
        &[
            "%r = for %k: i32 = 0 to %n step 1 carry(%s: f32 = 0) {",
            "  %t = add %s, 1 : f32",
            "  %u = add %k, 1 : i32",
            "  %w = mul %u, 7 : i32",
            "  yield 1",
            "}",
            "%z = mul %n, 7 : i32",
        ],
        &[
            "%2 = const 0 : i32",
            "%3 = const 1 : i32",
            "%4 = const 0.0 : f32",
            "%r = for %k: i32 = %2 to %n step %3 carry(%s: f32 = %4) {",
            "  %7 = const 1.0 : f32",
            "  %t = add %s, %7 : f32",
            "  %u = add %k, %3 : i32",
            "  %10 = const 7 : i32",
            "  %w = mul %u, %10 : i32",
            "  yield %7",
            "}",
            "%13 = const 7 : i32",
            "%z = mul %n, %13 : i32",
        ],
    );
    check(
        &[
            "%i = while carry(%w: i32 = 0) {",
            "  %go = lt.s %w, 4 : bool",
            "  yield %go",
            "} do {",
            "  %next = add %w, 4 : i32",
            "  yield %next",
            "}",
            "%o = if true : i32 {",
            "  yield 5",
            "} else {",
            "  yield %i",
            "}",
            "%p = switch %n : i32 {",
            "  case 3 {",
            "    yield 5",
            "  }",
            "  default {",
            "    yield 6",
            "  }",
            "}",
        ],
        &[
            "%2 = const 0 : i32",
            "%i = while carry(%w: i32 = %2) {",
            "  %4 = const 4 : i32",
            "  %go = lt.s %w, %4 : bool",
            "  yield %go",
            "} do {",
            "  %6 = const 4 : i32",
            "  %next = add %w, %6 : i32",
            "  yield %next",
            "}",
            "%9 = const true : bool",
            "%o = if %9 : i32 {",
            "  %10 = const 5 : i32",
            "  yield %10",
            "} else {",
            "  yield %i",
            "}",
            "%p = switch %n : i32 {",
            "  case 3 {",
            "    %12 = const 5 : i32",
            "    yield %12",
            "  }",
            "  default {",
            "    %13 = const 6 : i32",
            "    yield %13",
            "  }",
            "}",
        ],
    );
    // The old value of an atomic may stay without a name, and without its type then.
    check(
        &[
            "atomic.add.device @h[%n], 1",
            "atomic.cas.block @h[0], 1, %n : i32",
            "%old = atomic.max.s.device @h[0], %n : i32",
        ],
        &[
            "%2 = const 1 : i32",
            "%3 = atomic.add.device @h[%n], %2 : i32",
            "%4 = const 0 : i64",
            "%5 = atomic.cas.block @h[%4], %2, %n : i32",
            "%old = atomic.max.s.device @h[%4], %n : i32",
        ],
    );
}

#[test]
fn literals_of_open_type_are_refused() {
    let check = |line: &str, part: &str| {
        let error = text::parse(&source(&[line])).unwrap_err().to_string();
        assert!(error.contains(part), "{line}: {error}");
    };
    check(
        "%a = lt.s 1, 2 : bool",
        "the type of 1 is open here, as lt.s takes several; write `%name = const 1 : TYPE`",
    );
    check("%a = sitofp 1 : f32", "the type of 1 is open here");
    check("%a = bitcast 0x10 : f32", "the type of 0x10 is open here");
    check("%a = vec.extract 1, 0 : f32", "the type of 1 is open here");
    check("switch 1 {", "expected a value, found \"1\"");
    check("%a = add %n, 1.5 : i32", "1.5 is no i32");
    check("%a = add %n, 0x1ffffffff : i32", "0x1ffffffff is no i32");
    check("%a = add %n, many : i32", "expected a value or a literal, found \"many\"");
    check("%a = load @x[%n, 0.5] : f32", "0.5 is no i64");
    check("%a = atomic.add.device @h[%n], 1", "expected \":\" and the type of the result");
    check("yield 1", "the type of 1 is open here, as yield");
}

#[test]
fn constants_of_literals_are_bounded() {
    let many: Vec<String> = (0..40_000).map(|i| format!("%v{i} = add %n, {i} : i32")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let error = text::parse(&source(&many)).unwrap_err().to_string();
    assert!(error.contains("more than 65536 ops in a kernel"), "{error}");
}
