//! The table agrees with the functions that it is of.

use std::collections::HashMap;

use vm_ir::Scalar;

use super::table::{Argument, Extent, Language, Mark, Parameter, Shape, parse};
use super::{Arguments, Declared, FUNCTIONS, Kind, MAKERS};

/// Extents that fit together, no two of those alike that could be mistaken for each other.
const EXTENTS: [(&str, u64); 20] = [
    ("n", 35),
    ("size", 35),
    ("batch", 3),
    ("dim", 24),
    ("cols", 20),
    ("vocab_size", 40),
    ("M", 7),
    ("N", 5),
    ("K", 9),
    ("in_dim", 11),
    ("out_dim", 13),
    ("seq_len", 6),
    ("n_heads", 2),
    ("head_dim", 8),
    ("k", 4),
    ("top_k", 2),
    ("count", 15),
    ("rows", 17),
    ("batch_seq", 21),
    ("n_experts", 10),
];

fn scalar(of: &str, element: Scalar) -> Scalar {
    match of {
        "T" => element,
        "float" => Scalar::F32,
        "int64_t" => Scalar::I64,
        _ => Scalar::I32,
    }
}

/// Checks the buffers of a call, whose numbers are all 0 or all not, with what may be missing or without.
fn check(declared: &'static Declared, element: Scalar, number: f32, all: bool) {
    let Declared { table, spec } = declared;
    let extents = HashMap::from(EXTENTS);
    let word = |one: &Parameter<'_>| match one.kind {
        _ if one.is_pointer() => u64::from(all || !one.is_optional()) * 16,
        "float" if one.name == "scale" => 1f32.to_bits().into(),
        "float" => number.to_bits().into(),
        "flag" => 1,
        _ => extents.get(one.name).copied().unwrap_or(1),
    };
    let words: Vec<u64> = table.parameters.iter().map(word).collect();
    let call = Arguments { spec, name: declared.name(), element, words: &words };
    let function = call.function().unwrap();
    let buffers = function.buffers();
    let there: Vec<usize> = call.pointers().map(|(at, _)| at).collect();
    assert_eq!(buffers.len(), there.len(), "{}: {buffers:?}", table.name);
    for (at, buffer) in there.into_iter().zip(buffers) {
        let one = &table.parameters[at];
        let at = format!("{} {}: {buffer:?}", table.name, one.name);
        assert_eq!(buffer.element, scalar(one.element(), element), "{at}");
        let shape = &one.shape.as_ref().expect("a shape").extents;
        let of: Vec<u64> = shape.iter().map(|one| extents[one.name] * one.times / one.by).collect();
        // Some have a dimension of one more.
        let has: Vec<u64> = buffer.extents.iter().copied().filter(|extent| *extent != 1).collect();
        assert_eq!(has, of, "{at}");
        assert_eq!(buffer.access.writes(), one.is_result(), "{at}");
        match one.mark {
            // Of what it fills a function reads nothing, but its shape is told by nothing else.
            Mark::Updated(None) => assert!(buffer.access.reads() || table.name == "cuda_zero_grad", "{at}"),
            Mark::Updated(Some(_)) => assert_eq!(buffer.access.reads(), number != 0.0, "{at}"),
            // What kernels keep for a while in what they write is read, too.
            _ if table.name.ends_with("softmax") => {}
            _ => assert_eq!(buffer.access.reads(), one.is_given(), "{at}"),
        }
    }
}

#[test]
fn shapes_and_accesses_are_those_of_the_buffers() {
    assert_eq!(FUNCTIONS.len(), 36);
    for declared in FUNCTIONS.iter() {
        for element in [Scalar::F32, Scalar::Bf16, Scalar::F16] {
            for (number, all) in [(0.0, true), (0.5, true), (0.5, false)] {
                check(declared, element, number, all);
            }
        }
    }
}

#[test]
fn makers_are_in_the_order_of_the_table() {
    let names: Vec<&str> = FUNCTIONS.iter().map(Declared::name).collect();
    assert_eq!(names, MAKERS.iter().map(|maker| maker.name).collect::<Vec<_>>());
    for (declared, maker) in FUNCTIONS.iter().zip(MAKERS) {
        let varies = declared.spec.parameters.iter().any(|one| one.kind == Kind::Varying);
        assert_eq!(varies, maker.numbers.is_some(), "{}", maker.name);
    }
}

/// Who has arrays gives all that is needed: every extent is told by a shape or given, and every shape of a result can be found.
#[test]
fn arguments_tell_everything() {
    for Declared { table, .. } in FUNCTIONS.iter() {
        let (mut known, mut optional) = (Vec::new(), false);
        for argument in table.arguments() {
            match argument {
                Argument::Array { parameter, optional: may } => {
                    assert!(may || !optional, "{}: what may be missing comes last", table.name);
                    optional = may;
                    let shape = table.parameters[parameter].shape.as_ref().expect("a shape");
                    assert!(shape.extents.iter().filter(|one| one.many).count() < 2, "{}", table.name);
                    known.extend(shape.extents.iter().filter(|one| one.times == one.by).map(|one| one.name));
                }
                Argument::Number(at) => known.push(table.parameters[at].name),
                Argument::Wanted(_) => {}
            }
        }
        let shapes = table.results().filter_map(|(_, one)| one.shape.as_ref());
        let mut needed: Vec<&str> = shapes.flat_map(|shape| &shape.extents).map(|one| one.name).collect();
        needed.extend(table.parameters.iter().filter(|one| one.kind() == Kind::Extent).map(|one| one.name));
        let unknown: Vec<_> = needed.iter().filter(|name| !known.contains(name)).collect();
        assert!(unknown.is_empty(), "{}: nothing tells {unknown:?}", table.name);
    }
}

#[test]
fn lines_are_read() {
    let line = "/// It is {NULL|None}\n/// or not.\n\
                f(const T *x[n..., d / 2, d3 * 2], float *y[]?more, T *z[n...]&beta, float *w!, int64_t n, float a% = 1e-8): f32 +workspace";
    let functions = parse(line).unwrap();
    let [function] = &functions[..] else { panic!("{functions:?}") };
    assert_eq!(function.comment(Language::C), ["It is NULL", "or not."]);
    assert_eq!(function.comment(Language::Python), ["It is None", "or not."]);
    assert!(function.workspace && function.elements == ["f32"]);
    let [x, y, z, w, n, a] = &function.parameters[..] else { panic!("{function:?}") };
    let extent = |name, times, by, many| Extent { name, times, by, many };
    let extents = vec![extent("n", 1, 1, true), extent("d", 1, 2, false), extent("d3", 2, 1, false)];
    assert_eq!(x.shape, Some(Shape { text: "n..., d / 2, d3 * 2", extents }));
    assert_eq!((x.name, x.kind, x.mark), ("x", "const T *", Mark::None));
    assert_eq!((y.mark, z.mark), (Mark::Optional(Some("more")), Mark::Updated(Some("beta"))));
    assert_eq!(y.shape, Some(Shape { text: "", extents: vec![] }));
    assert_eq!((w.mark, w.kind()), (Mark::Scratch, Kind::Workspace));
    assert_eq!((n.kind(), a.kind(), a.default), (Kind::Extent, Kind::Varying, Some("1e-8")));
    let array = |parameter, optional| Argument::Array { parameter, optional };
    let wanted = [array(0, false), array(2, true), Argument::Number(5), Argument::Wanted("more")];
    assert_eq!(function.arguments(), wanted);

    for bad in ["f", "f(int n)", "f(T x[n): f32", "f(T *x[n / 0]): f32", "f(T *x#): f32", "f(int n%a): f32"] {
        assert!(parse(bad).is_err(), "{bad}");
    }
}
