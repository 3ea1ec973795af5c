//! Rotary position embedding.

use vm_graph::{Element, Value};

use super::{Built, Draft, Drawn, NoGraph};
use crate::call::Function as _;
use crate::rope::{Angles, Pairs, Rope};

/// Queries and keys turned by the angles of their positions.
pub(crate) fn rope(of: &Rope) -> Drawn {
    let mut g = Draft::of("rope", of.buffers())?;
    if of.dim == 0 || !of.dim.is_multiple_of(2) {
        return Err(g.no(format!("heads of {} elements; they are of an even number", of.dim)));
    }
    let [cos, sin] = turns(&mut g, of)?;
    for name in ["q", "k"] {
        // There may be no keys.
        if !g.is_empty(name) {
            let x = g.float(name)?;
            let turned = turned(&mut g, of.pairs, x, [cos, sin])?;
            g.put(name, turned)?;
        }
    }
    g.finish()
}

/// The cosines and sines of each token, for all of its heads: `[batch or 1, tokens, 1, half]`.
fn turns(g: &mut Draft, of: &Rope) -> Result<[Value; 2], NoGraph> {
    let Rope { batch, tokens, rows, first, angles, .. } = *of;
    let half = u64::from(of.dim / 2);
    let (sequences, positions) = match of.positions {
        true => (batch, g.given("positions")?),
        false => (1, g.count_from(first.into(), Element::I64, &[1, tokens])?),
    };
    let shape = [sequences, tokens, 1, half];
    if angles == Angles::Frequencies {
        let frequencies = g.float("frequencies")?;
        let positions = g.reshape(positions, &[sequences, tokens, 1, 1])?;
        let positions = g.cast(positions, Element::F32)?;
        let angle = g.mul(positions, frequencies)?;
        let (cos, sin) = (g.cos(angle)?, g.sin(angle)?);
        return Ok([cos, signed(g, of, sin)?]);
    }
    let all_known = !of.positions && u64::from(first).saturating_add(tokens) <= rows;
    let known = (!all_known).then(|| {
        let known = g.below(positions, rows)?;
        g.reshape(known, &[sequences, tokens, 1, 1])
    });
    let known = known.transpose()?;
    // A token whose position has no angle stays as it is.
    let mut look_up = |name: &str| {
        let table = g.float(name)?;
        let found = match all_known {
            true => g.slice(table, 0, first.into(), u64::from(first) + tokens)?,
            false => g.gather(table, positions, 0)?,
        };
        Ok::<_, NoGraph>(g.reshape(found, &shape)?)
    };
    let (mut cos, mut sin) = match angles {
        Angles::CosSin => (look_up("cos")?, look_up("sin")?),
        _ => {
            let angle = look_up("angles")?;
            (g.cos(angle)?, g.sin(angle)?)
        }
    };
    if let Some(known) = known {
        (cos, sin) = (g.or(known, cos, 1.0)?, g.or(known, sin, 0.0)?);
    }
    Ok([cos, signed(g, of, sin)?])
}

fn signed(g: &mut Draft, of: &Rope, sin: Value) -> Built {
    if of.inverse { g.neg(sin) } else { Ok(sin) }
}

/// Each pair turned.
fn turned(g: &mut Draft, pairs: Pairs, x: Value, [cos, sin]: [Value; 2]) -> Result<Value, NoGraph> {
    let extents = g.type_of(x).extents.clone();
    let dim = extents[3];
    let [a, b] = match pairs {
        Pairs::Halves => [g.slice(x, 3, 0, dim / 2)?, g.slice(x, 3, dim / 2, dim)?],
        Pairs::Interleaved => [g.slice_by(x, 3, 0, dim, 2)?, g.slice_by(x, 3, 1, dim, 2)?],
    };
    let mut part = |a: Value, b: Value| {
        let (along, across) = (g.mul(a, cos)?, g.mul(b, sin)?);
        Ok::<_, NoGraph>([along, across])
    };
    let ([a_cos, b_sin], [b_cos, a_sin]) = (part(a, b)?, part(b, a)?);
    let both = [g.sub(a_cos, b_sin)?, g.add(b_cos, a_sin)?];
    if pairs == Pairs::Halves {
        return Ok(g.concat(&both, 3)?);
    }
    let mut apart = [extents.as_slice(), &[1]].concat();
    apart[3] = dim / 2;
    let [a, b] = both.map(|part| g.reshape(part, &apart));
    let all = g.concat(&[a?, b?], 4)?;
    Ok(g.reshape(all, &extents)?)
}
