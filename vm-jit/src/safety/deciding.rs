//! Which loads decide where a guest's kernel reads and writes.
//!
//! A guest may change memory while its kernel runs, and a compiler that we don't control takes a plain load for one that
//! nobody races with: it may reload what it has no register for. What was checked is then not what is used. So where a
//! value was loaded from and an index, or a condition that the ranges of indices are known by, is computed of it, the load must
//! be one that is done once. A thread's own memory nobody else changes; what was stored there may be loaded from other memory.

use std::collections::HashMap;

use vm_ir::module::{Op, Place, Region};
use vm_ir::op::{PlaceRule, Shape};
use vm_ir::{Kernel, Value};

/// Where a value comes from.
#[derive(Clone, Copy)]
enum Source<'k> {
    /// It is the result of an op with this number among its results.
    Result(&'k Op, usize),
    /// It is an argument, with this number, of a region of an op.
    Argument(&'k Op, usize),
}

/// Finds the ops that load what decides; each use is looked at once.
pub(super) fn find(kernel: &Kernel) -> Vec<&Op> {
    let mut sources: HashMap<Value, Source<'_>> = HashMap::new();
    let (mut indices, mut conditions): (Vec<Value>, Vec<Value>) = Default::default();
    let mut stored: HashMap<Place, Vec<Value>> = HashMap::new();
    kernel.for_each_op(&mut |op| {
        sources.extend(op.results.iter().enumerate().map(|(i, value)| (*value, Source::Result(op, i))));
        for region in &op.regions {
            let arguments = region.args.iter().enumerate();
            sources.extend(arguments.map(|(i, value)| (*value, Source::Argument(op, i))));
        }
        let shape = op.code.shape();
        if let (PlaceRule::Any | PlaceRule::Shared, Some(place)) = (shape.place(), op.place) {
            let rank = kernel.place(place).map_or(0, |(rank, _)| rank);
            indices.extend(op.operands.iter().take(rank));
        }
        if let (Shape::Store, Some(place @ Place::Local(_)), Some(value)) =
            (shape, op.place, op.operands.last())
        {
            stored.entry(place).or_default().push(*value);
        }
        match shape {
            Shape::If | Shape::Switch => conditions.extend(&op.operands),
            Shape::For => conditions.extend(op.operands.iter().take(3)),
            Shape::While => conditions.extend(op.regions.first().and_then(|region| region.yields.first())),
            _ => {}
        }
    });
    let mut found = Vec::new();
    let mut seen = vec![false; kernel.values().len()];
    // No range follows from floats that were compared.
    for (roots, through_floats) in [(indices, true), (conditions, false)] {
        let mut pending = roots;
        while let Some(value) = pending.pop() {
            match seen.get_mut(value.index()) {
                Some(seen) if !*seen => *seen = true,
                _ => continue,
            }
            match sources.get(&value) {
                Some(Source::Result(op, _)) if op.code.shape() == Shape::Load => match op.place {
                    // Each array's once: that is all there is to find through it.
                    Some(place @ Place::Local(_)) => {
                        pending.extend(stored.remove(&place).into_iter().flatten())
                    }
                    _ => found.push(*op),
                },
                Some(Source::Result(op, _)) if !through_floats && compares_floats(kernel, op) => {}
                Some(source) => pending.extend(made_of(*source)),
                None => {}
            }
        }
    }
    found
}

fn compares_floats(kernel: &Kernel, op: &Op) -> bool {
    let float = |value: &Value| kernel.values()[value.index()].ty.scalar().is_float();
    matches!(op.code.shape(), Shape::Compare(_)) && op.operands.first().is_some_and(float)
}

/// What a value is made of, without what chooses: that is a condition by itself.
fn made_of(source: Source<'_>) -> Vec<Value> {
    let (Source::Result(op, at) | Source::Argument(op, at)) = source;
    let yields = |region: &Region, at: usize| region.yields.get(at).copied();
    let operand = |at: usize| op.operands.get(at).copied();
    match (op.code.shape(), source, &op.regions[..]) {
        (Shape::For, Source::Argument(_, 0), _) => op.operands.iter().take(3).copied().collect(),
        (Shape::For, Source::Argument(..), [body]) => {
            operand(at + 2).into_iter().chain(yields(body, at - 1)).collect()
        }
        (Shape::For, Source::Result(..), [body]) => {
            operand(at + 3).into_iter().chain(yields(body, at)).collect()
        }
        (Shape::While, _, [_, body]) => operand(at).into_iter().chain(yields(body, at)).collect(),
        (Shape::If | Shape::Switch, _, regions) => {
            regions.iter().filter_map(|region| yields(region, at)).collect()
        }
        _ => op.operands.clone(),
    }
}
