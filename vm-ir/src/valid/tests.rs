//! The largest that each limit allows and one beyond it, and the rules that the parser and the decoder enforce before the validator.

use super::*;
use crate::limits::{MAX_ERRORS, MAX_OPS, MAX_RESIDENT, MAX_SHARED_ARRAYS};
use crate::module::{ParamKind, SharedArray};
use crate::op::Opcode;
use crate::text;

/// Returns the module of a text.
fn module(source: &str) -> Module {
    text::parse(&format!("vir 1\n{source}")).expect("text of the IR")
}

/// Returns the codes of the rules that a module breaks, each as often as it is reported.
fn broken(module: Module) -> Vec<&'static str> {
    validate(module, Trust::Guest)
        .map_or_else(|errors| errors.0.iter().map(|e| e.kind.code()).collect(), |_| Vec::new())
}

/// Returns those of a kernel with this head and body.
fn broken_kernel(params: &str, block: &str, body: &str) -> Vec<&'static str> {
    broken(module(&format!("kernel @k({params}) at 0x1000 {block} {{\n{body}\n}}\n")))
}

fn facts(body: &str) -> KernelFacts {
    let source =
        format!("kernel @k(@v: view<i32, [?], readwrite>, %n: i32) at 0x1000 block(64) {{\n{body}\n}}\n");
    let valid = validate(module(&source), Trust::Guest).expect("valid");
    valid.find("k").expect("the kernel").1.clone()
}

#[test]
fn each_limit_allows_itself_and_nothing_beyond() {
    let view = |ty: &str| broken_kernel(&format!("@v: view<{ty}, read>"), "block(1)", "");
    let scalar = |ty: &str| broken_kernel(&format!("%p: {ty}"), "block(1)", "");
    let block = |block: &str| broken_kernel("", block, "");
    let body = |body: &str| broken_kernel("", "block(1)", body);
    let arrays = |shared: usize, local: usize| {
        let shared = (0..shared).map(|i| format!("shared @s{i}: i8[16]\n"));
        let local = (0..local).map(|i| format!("local @l{i}: i8[16]\n"));
        body(&shared.chain(local).collect::<String>())
    };
    let cases: &[(Vec<&str>, Vec<&str>)] = &[
        (view("f32, [?, ?, ?, ?]"), vec![]),
        (view("f32, [1099511627776]"), vec![]),
        (view("f32, [1099511627777]"), vec!["view-dims"]),
        (broken_kernel("@v: view<f32, [?], read, align 4>", "block(1)", ""), vec![]),
        (broken_kernel("@v: view<f32, [?], read, align 256>", "block(1)", ""), vec![]),
        (broken_kernel("@v: view<f32, [?], read, align 512>", "block(1)", ""), vec!["view-align"]),
        (scalar("i8 in [-128, 127]"), vec![]),
        (scalar("i8 in [-129, 127]"), vec!["param-range"]),
        (scalar("i8 in [-128, 128]"), vec!["param-range"]),
        (scalar("i8 in [5, 5]"), vec![]),
        (block("block(1024)"), vec![]),
        (block("block(1, 1024)"), vec![]),
        (block("block(1, 1, 64)"), vec![]),
        (block(&format!("block(1) resident({MAX_RESIDENT})")), vec![]),
        (body("shared @s: i8[232448]"), vec![]),
        (body("shared @s: i8[232449]"), vec!["shared-size"]),
        (body("shared @s: i8[1, 1, 1, 16]"), vec![]),
        (body("local @l: i8[16384]"), vec![]),
        (body("local @l: i8[16385]"), vec!["local-size"]),
        (arrays(MAX_SHARED_ARRAYS, 0), vec![]),
        (arrays(1, MAX_SHARED_ARRAYS - 1), vec![]),
    ];
    for (number, (found, expected)) in cases.iter().enumerate() {
        assert_eq!(found, expected, "case {number}");
    }
}

/// A module with one kernel, changed as no text and no bytes could.
fn changed(body: &str, change: impl FnOnce(&mut Kernel)) -> Vec<&'static str> {
    let mut module =
        module(&format!("kernel @k(@v: view<f32, [?], read>, %n: i32) at 0x1000 block(32) {{\n{body}\n}}\n"));
    change(&mut module.kernels[0]);
    broken(module)
}

#[test]
fn what_no_text_can_say_is_refused_too() {
    assert_eq!(changed("", |_| {}), Vec::<&str>::new());
    assert_eq!(changed("", |k| k.name = "a b".into()), ["name"]);
    assert_eq!(changed("", |k| k.name = "".into()), ["name"]);
    assert_eq!(changed("%x = add %n, %n : i32", |k| k.body.ops[0].attrs[1] = 1), ["attribute"]);
    let atomic = "%o = atomic.add.device @w[%n], %n : i32";
    let scope = |index: u8| {
        let source =
            format!("kernel @k(@w: view<i32, [?], readwrite>, %n: i32) at 0x0 block(32) {{\n{atomic}\n}}\n");
        let mut module = module(&source);
        let op = &mut module.kernels[0].body.ops[0];
        let words = op.code.info().attrs[1].words().len() as u8;
        op.attrs[1] = index.wrapping_add(words);
        broken(module)
    };
    assert_eq!(scope(0), ["attribute"]);
    assert_eq!(scope(u8::MAX), Vec::<&str>::new());
    let array = |len: usize| {
        let array = |i: usize| SharedArray {
            name: format!("s{i}").into(),
            ..module("kernel @k() at 0x0 block(1) {\nshared @s: i8[16]\n}").kernels[0].shared[0].clone()
        };
        changed("", |k| k.shared = (0..len).map(array).collect())
    };
    assert_eq!(array(MAX_SHARED_ARRAYS), Vec::<&str>::new());
    assert_eq!(array(MAX_SHARED_ARRAYS + 1), ["too-many"]);
    let dims = |dims: &[u32]| {
        let dims = dims.to_vec();
        changed("shared @s: i8[16]", |k| k.shared[0].dims = dims)
    };
    assert_eq!(dims(&[]), ["shared-dims"]);
    assert_eq!(dims(&[1, 1, 1, 1, 1]), ["shared-dims"]);
    assert_eq!(
        changed("", |k| {
            let ParamKind::View(view) = &mut k.params[0].kind else { panic!("a view") };
            view.names[0] = Some("a b".into());
        }),
        ["extent-name"]
    );
}

#[test]
fn ops_are_counted_wherever_they_are() {
    let ops = |count: usize| {
        let op = "%x = add %n, %n : i32";
        changed(op, |k| {
            let mut one = k.body.ops[0].clone();
            one.results = vec![];
            one.code = Opcode::Barrier;
            one.operands = vec![];
            k.body.ops = vec![one; count];
        })
    };
    assert_eq!(ops(MAX_OPS), Vec::<&str>::new());
    assert_eq!(ops(MAX_OPS + 1), ["too-many"]);
    assert_eq!(ops(MAX_OPS + 3), ["too-many"]);
    let nested = facts("%c = const true : bool\nif %c {\n%x = add %n, %n : i32\n}");
    assert_eq!((nested.ops, nested.depth), (3, 2));
}

#[test]
fn errors_inside_a_wrong_op_are_found_and_no_more_than_a_limit_are_reported() {
    let inside =
        broken_kernel("%n: i32", "block(1)", "%c = const true : bool\nif %c {\n%x = add %n, %c : i32\n}");
    assert_eq!(inside, ["operand"]);
    let wrong_twice = changed("%c = const true : bool\nif %c {\n%x = add %n, %n : f32\n}", |k| {
        let condition = k.body.ops[1].operands[0];
        k.body.ops[1].operands.push(condition);
    });
    assert_eq!(wrong_twice, ["operand-count", "result"]);
    let many = |count: usize| {
        let body: String = (0..count).map(|i| format!("%x{i} = add %n, %n : f32\n")).collect();
        broken_kernel("%n: i32", "block(1)", &body).len()
    };
    assert_eq!(many(MAX_ERRORS - 1), MAX_ERRORS - 1);
    assert_eq!(many(MAX_ERRORS), MAX_ERRORS);
    assert_eq!(many(MAX_ERRORS + 1), MAX_ERRORS);
}

#[test]
fn a_loop_without_bounds_says_how_many_operands_it_needs() {
    let body = "%a, %b = for %i: i32 = %n to %n step %n carry(%x: i32 = %n, %y: i32 = %n) {\nyield %x, %y\n}";
    let mut module = module(&format!("kernel @k(%n: i32) at 0x1000 block(1) {{\n{body}\n}}\n"));
    module.kernels[0].body.ops[0].operands.truncate(2);
    let errors = validate(module, Trust::Guest).expect_err("two operands");
    assert!(matches!(errors.0[0].kind, Rule::OperandCount { expected: 5, found: 2 }), "{errors}");
}

#[test]
fn facts_are_of_the_ops_that_a_kernel_has() {
    let flags = |body: &str| {
        let facts = facts(body);
        (facts.block_barriers, facts.warp_ops, facts.atomics)
    };
    let (barrier, warp) = ("barrier.block", "%w = shuffle.xor %n, %n : i32");
    let (atomic, plain) = ("%z = const 0 : i32\natomic.add.device @v[%z], %n : i32", "%p = add %n, %n : i32");
    assert_eq!(flags(plain), (false, false, false));
    assert_eq!(flags(&format!("{barrier}\n{plain}")), (true, false, false));
    assert_eq!(flags(&format!("{warp}\n{plain}")), (false, true, false));
    assert_eq!(flags(&format!("{atomic}\n{plain}")), (false, false, true));
    let with_values = facts(plain);
    assert_eq!((with_values.uniformity.len(), with_values.steady.len()), (2, 2));
}

#[test]
fn a_valid_module_gives_its_module_back() {
    let source = "kernel @k() at 0x1000 block(1) {\n}\n";
    let valid = validate(module(source), Trust::Guest).expect("valid");
    assert_eq!(valid.into_module(), module(source));
}
