//! Every rule of the validator has a case that breaks it: a file under `filetests/validate`, or, where no text can
//! break it because the parser is first, a module from the builder or from bytes here.

use std::collections::BTreeSet;
use std::path::Path;
use vm_ir::binary::{Lines, decode, encode};
use vm_ir::builder::IRBlock;
use vm_ir::valid::Rule;
use vm_ir::view::{Access, Dim, ViewType};
use vm_ir::{Builder, GuestAddr, Kernel, Module, Scalar, Trust, Type, text, validate};

/// The codes of the rules that a module breaks.
fn broken(module: Module) -> BTreeSet<&'static str> {
    match validate(module, Trust::Guest) {
        Ok(_) => BTreeSet::new(),
        Err(errors) => errors.0.iter().map(|e| e.kind.code()).collect(),
    }
}

fn built(build: impl FnOnce(Builder<'_>)) -> Kernel {
    let block = IRBlock::new(GuestAddr(0x2000));
    build(block.builder());
    block.kernel().unwrap()
}

/// The module of `text`, with one byte of its binary form changed from `from` to `to`, the last one there is.
fn patched(source: &str, from: &[u8], to: &[u8]) -> Module {
    let mut bytes = encode(&text::parse(source).unwrap(), Lines::Strip);
    let at = bytes.windows(from.len()).rposition(|w| w == from).expect("the bytes to change");
    bytes.splice(at..at + from.len(), to.iter().copied());
    decode(&bytes).unwrap()
}

/// What text cannot break, by rule.
fn beyond_text() -> Vec<(&'static str, Module)> {
    let head = "vir 1\nkernel @k(%n: i32) at 0x0 block(32) {\n";
    let kernel = |body: &str| format!("{head}{body}}}\n");
    let same = built(|k| {
        k.name("same");
    });
    let deep = built(|k| {
        fn nest(k: Builder<'_>, condition: vm_ir::builder::Val<'_>, depth: usize) {
            if depth > 0 {
                k.if_(condition, || nest(k, condition, depth - 1));
            }
        }
        nest(k, k.bool(true), 31);
    });
    assert!(broken(deep.into()).is_empty(), "32 regions are allowed");
    vec![
        ("duplicate-name", Module::new(vec![same.clone(), same.clone()])),
        (
            "too-many",
            Module::new(
                (0..257)
                    .map(|i| {
                        built(|k| {
                            k.name(&format!("k{i}"));
                        })
                    })
                    .collect(),
            ),
        ),
        // An `add` (code 0x10, no place, two operands, no numbers, no regions) with a result more and one less.
        (
            "result-count",
            patched(
                &kernel("  %0 = add %n, %n : i32\n"),
                &[0x10, 0, 2, 0, 0, 0, 0, 1, 3, 0],
                &[0x10, 0, 2, 0, 0, 0, 0, 2, 3, 0, 3, 0],
            ),
        ),
        (
            "region-count",
            patched(
                &kernel("  %0 = add %n, %n : i32\n"),
                &[0x10, 0, 2, 0, 0, 0, 0, 1, 3, 0],
                &[0x10, 0, 2, 0, 0, 0, 1, 0, 0, 0, 1, 3, 0],
            ),
        ),
        // Names that no text can put there.
        (
            "extent-name",
            built(|k| {
                let view = ViewType::new(Scalar::F32, 1, Access::Read);
                k.view_of("fixed", view.clone().with_dims(&[Dim::Fixed(4)]).named(&["n"]));
                k.view_of("beyond", view.clone().named(&["n", "m"]));
                k.view_of("odd", view.named(&["a b"]));
            })
            .into(),
        ),
        // A `const` of a bool with the bits 2.
        (
            "const-bits",
            patched(&kernel("  %0 = const true : bool\n"), &[1, 0, 0, 1, 1, 0], &[1, 0, 0, 1, 2, 0]),
        ),
    ]
}

#[test]
fn every_rule_is_broken_somewhere() {
    let mut seen = BTreeSet::new();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("filetests/validate");
    for entry in std::fs::read_dir(folder).unwrap() {
        if let Ok(module) = text::parse(&std::fs::read_to_string(entry.unwrap().path()).unwrap()) {
            seen.extend(broken(module));
        }
    }
    for (rule, module) in beyond_text() {
        let codes = broken(module);
        assert!(codes.contains(rule), "{rule}: {codes:?}");
        seen.extend(codes);
    }
    // The builder, the parser and the decoder refuse these before there is a module; the validator looks again.
    let unreachable = BTreeSet::from(["name", "depth", "attribute"]);
    let all: BTreeSet<_> = Rule::CODES.iter().copied().collect();
    assert_eq!(all.difference(&seen).copied().collect::<BTreeSet<_>>(), unreachable);
    assert!(seen.is_subset(&all));
}

#[test]
fn builder_keeps_the_first_error() {
    let check = |part: &str, build: &dyn Fn(Builder<'_>)| {
        let block = IRBlock::new(GuestAddr(0xabc));
        build(block.builder());
        let error = block.kernel().unwrap_err();
        assert!(error.to_string().contains(part), "{error}, not {part}");
        assert!(error.to_string().contains("at 0xabc"), "{error}");
        error
    };
    let line = line!() + 2;
    let error = check("\"2x\" is no name", &|k| {
        let _ = k.name("2x");
    });
    assert_eq!(error.line, line);
    check("300 is no i8", &|k| {
        let _ = k.constant(Type::I8, 300);
    });
    check("0.5 is no i32", &|k| {
        let _ = k.i32(1) + 0.5;
    });
    check("not 3", &|k| {
        let _ = k.f32(1.0).splat(3);
    });
    check("not 17", &|k| {
        let _ = k.vector(&vec![k.f32(1.0); 17]);
    });
    check("the name v is taken", &|k| {
        k.view("v", Scalar::F32, 1, Access::Read);
        k.shared("v", Scalar::F32, &[4]);
    });
    check("parameters come before", &|k| {
        k.i32(1);
        k.scalar("late", Type::I32);
    });
    check("more than 64 parameters", &|k| {
        for i in 0..65 {
            k.scalar(&format!("p{i}"), Type::I32);
        }
    });
    check("belongs to another kernel", &|k| {
        let other = IRBlock::new(GuestAddr(1));
        // The two builders live equally long here, so only the check at run time can tell.
        fn mix<'b>(k: Builder<'b>, other: Builder<'b>) {
            let _ = k.i32(1) + other.i32(2);
        }
        mix(k, other.builder());
    });
    check("nested more than 32 deep", &|k| {
        fn nest(k: Builder<'_>, depth: usize) {
            if depth > 0 {
                k.if_(k.bool(true), || nest(k, depth - 1));
            }
        }
        nest(k, 32);
    });
}

#[test]
fn an_error_names_kernel_guest_line_and_op() {
    let source = "vir 1\nkernel @k(%f: f32) at 0xdeadbeef block(1) {\n  %x = add %f, %f : i32\n}\n";
    let error = validate(text::parse(source).unwrap(), Trust::Guest).unwrap_err().to_string();
    assert_eq!(error, "kernel @k at 0xdeadbeef, line 3, add: the result is i32, not f32");

    let block = IRBlock::new(GuestAddr(0x1000));
    let k = block.builder();
    let line = line!() + 1;
    let _ = k.i32(1) + k.f32(2.0);
    let error = validate(block.kernel().unwrap().into(), Trust::Guest).unwrap_err().to_string();
    assert_eq!(error, format!("kernel @kernel at 0x1000, line {line}, add: operand 2 is f32, not i32"));
}

#[test]
fn an_empty_block_is_a_kernel() {
    let block = IRBlock::new(GuestAddr(0x1000));
    let module = validate(block.kernel().unwrap().into(), Trust::Guest).unwrap();
    assert_eq!(text::print(&module), "vir 1\n\nkernel @kernel() at 0x1000 block(1) {\n}\n");
}
