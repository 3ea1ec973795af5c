//! Graphs that are made of graphs.

use vm_graph::{Builder, Element, GraphError, Place, Tensor, ValidGraph, Value, evaluate, limits, validate};

fn graph(build: impl FnOnce(&mut Builder) -> Result<(), GraphError>) -> ValidGraph {
    let mut builder = Builder::new("inner");
    build(&mut builder).unwrap();
    builder.finish().unwrap()
}

/// `sum = a + b`, and the two greatest of `a`, the second of two results that are outputs in the other order.
fn inner() -> ValidGraph {
    graph(|g| {
        let a = g.input("a", Element::F32, &[3])?;
        let b = g.input("b", Element::F32, &[3])?;
        let [values, places] = g.top_k(a, 0, 2)?;
        let one = g.constant(Tensor::number(Element::F32, 1.0))?;
        let sum = g.add(a, b)?;
        let sum = g.add(sum, one)?;
        g.output("places", places)?;
        g.output("values", values)?;
        g.output("sum", sum)?;
        g.output("itself", b)
    })
}

#[test]
fn operations_take_the_place_of_a_graph() {
    let inner = inner();
    let mut b = Builder::new("outer");
    let x = b.input("x", Element::F32, &[3]).unwrap();
    let y = b.neg(x).unwrap();
    let first = b.inline(&inner, &[y, x]).unwrap();
    let [places, values, sum, itself] = first[..] else { panic!("{first:?}") };
    assert_eq!(itself, x);
    let second = b.inline(&inner, &[sum, sum]).unwrap();
    for (name, value) in [("places", places), ("values", values), ("sum", second[2])] {
        b.output(name, value).unwrap();
    }
    let outer = b.finish().unwrap();
    assert_eq!(outer.nodes.len(), 1 + 2 * inner.nodes.len());
    let expected = [vec![2.0, 0.0], vec![-1.0, -2.0], vec![3.0; 3]];
    let x = [vec![2.0, 5.0, 1.0]];
    assert_eq!(evaluate(&outer, &x).unwrap(), expected);
    // What is left has the same outputs, and its types are those that are found again.
    let live = outer.clone().eliminate_dead_code();
    assert_eq!(live.nodes.len(), outer.nodes.len() - 1);
    assert_eq!(evaluate(&live, &x).unwrap(), expected);
    assert_eq!(validate(live.clone().into_inner()).unwrap(), live);
    assert_eq!(live.clone().eliminate_dead_code(), live);
}

#[test]
fn what_no_output_needs_is_left_out() {
    let unused = graph(|g| {
        let a = g.input("a", Element::F32, &[3])?;
        g.input("b", Element::F32, &[3])?;
        let dead = g.exp(a)?;
        g.neg(dead)?;
        g.output("y", a)
    });
    let live = unused.eliminate_dead_code();
    assert_eq!((live.inputs.len(), live.nodes.len()), (2, 0));
    assert_eq!(evaluate(&live, &[vec![1.0; 3], vec![2.0; 3]]).unwrap(), [[1.0; 3]]);
}

#[test]
fn what_does_not_fit_is_refused_and_adds_nothing() {
    let inner = inner();
    let check = |inputs: &[(Element, &[u64])], place: Place, words: &str| {
        let mut b = Builder::new("outer");
        let values: Vec<Value> = (0..)
            .zip(inputs)
            .map(|(number, (element, extents))| b.input(&format!("x{number}"), *element, extents).unwrap())
            .collect();
        let before = format!("{b:?}");
        let error = b.inline(&inner, &values).unwrap_err();
        assert!(matches!(&error, GraphError::Rule { place: at, .. } if *at == place), "{error:?}");
        assert!(error.to_string().contains(words), "{error} does not say {words}");
        assert_eq!(format!("{b:?}"), before);
    };
    let f32s = (Element::F32, &[3][..]);
    check(&[f32s], Place::Graph, "inner takes 2 inputs, and is given 1");
    check(&[f32s; 3], Place::Graph, "inner takes 2 inputs, and is given 3");
    check(&[f32s, (Element::F16, &[3])], Place::Argument(1), "b of inner is f32[3], and is given f16[3]");
    check(&[(Element::F32, &[1, 3]), f32s], Place::Argument(0), "is given f32[1, 3]");
    let mut b = Builder::new("outer");
    let x = b.input("x", Element::F32, &[3]).unwrap();
    let error = b.inline(&inner, &[x, Value(7)]).unwrap_err().to_string();
    assert!(error.contains("is given value 7, which is not defined"), "{error}");

    // The caps are those of the whole.
    let many = graph(|g| {
        let a = g.input("a", Element::F32, &[1])?;
        let mut y = a;
        for _ in 0..limits::MAX_NODES / 2 {
            y = g.neg(y)?;
        }
        g.output("y", y)
    });
    let mut b = Builder::new("outer");
    let x = b.input("x", Element::F32, &[1]).unwrap();
    let y = b.inline(&many, &[x]).unwrap()[0];
    let y = b.inline(&many, &[y]).unwrap()[0];
    let error = b.inline(&many, &[y]).unwrap_err().to_string();
    assert!(error.contains("with inner it has 98304 operations; there can be 65536"), "{error}");
    b.output("y", y).unwrap();
    assert_eq!(b.finish().unwrap().nodes.len(), limits::MAX_NODES);
}
