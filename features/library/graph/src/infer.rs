//! The types of what operations give, and what they may take.

use crate::limits::MAX_WINDOW;
use crate::op::{Binary, Convolution, Op, Unary};
use crate::{Element, TensorType};

type Said<T> = Result<T, String>;

/// The types of an operation's results, where its operands are of these.
pub(crate) fn types(op: &Op, operands: &[&TensorType]) -> Said<Vec<TensorType>> {
    if let Op::TopK { axis, k } = op {
        let [x] = take(operands)?;
        let axis = dimension(x, *axis)?;
        numeric(x)?;
        if *k > x.extents[axis] {
            return Err(format!("there are {} of which to take {k}", x.extents[axis]));
        }
        let mut values = x.clone();
        values.extents[axis] = *k;
        let places = TensorType { element: Element::I64, extents: values.extents.clone() };
        return Ok(vec![values, places]);
    }
    Ok(vec![one(op, operands)?])
}

fn one(op: &Op, operands: &[&TensorType]) -> Said<TensorType> {
    Ok(match op {
        Op::Constant(tensor) => {
            let [] = take(operands)?;
            tensor.ty.clone()
        }
        Op::Unary(unary) => {
            let [x] = take(operands)?;
            let signed = matches!(x.element, Element::I8 | Element::I16 | Element::I32 | Element::I64);
            match unary {
                Unary::Not => of(x, x.element == Element::Bool, "truth values")?,
                Unary::Neg | Unary::Abs | Unary::Sign => {
                    of(x, x.element.is_float() || signed, "floats or signed integers")?
                }
                _ => floats(x)?,
            }
            x.clone()
        }
        Op::Binary(binary) => {
            let [a, b] = take(operands)?;
            match binary {
                Binary::Div | Binary::Pow => floats(a)?,
                _ => numeric(a)?,
            }
            alike(a, b)?;
            TensorType { element: a.element, extents: broadcast(a, b)? }
        }
        Op::Logic(_) => {
            let [a, b] = take(operands)?;
            of(a, a.element == Element::Bool, "truth values")?;
            alike(a, b)?;
            TensorType { element: Element::Bool, extents: broadcast(a, b)? }
        }
        Op::Compare(_) => {
            let [a, b] = take(operands)?;
            numeric(a)?;
            alike(a, b)?;
            TensorType { element: Element::Bool, extents: broadcast(a, b)? }
        }
        Op::Select => {
            let [condition, a, b] = take(operands)?;
            of(condition, condition.element == Element::Bool, "truth values")?;
            alike(a, b)?;
            let both = TensorType { element: a.element, extents: broadcast(a, b)? };
            TensorType { element: a.element, extents: broadcast(condition, &both)? }
        }
        Op::Cast(element) => {
            let [x] = take(operands)?;
            TensorType { element: *element, extents: x.extents.clone() }
        }
        Op::MatMul => mat_mul(operands)?,
        Op::Convolution(convolution) => self::convolution(convolution, operands)?,
        Op::Pool(pool) => {
            let [x] = take(operands)?;
            floats(x)?;
            let [n, c, height, width] = images(x)?;
            let along = |axis: usize, extent| {
                windows(extent, pool.window[axis], 1, pool.strides[axis], pool.pads[axis])
            };
            TensorType { element: x.element, extents: vec![n, c, along(0, height)?, along(1, width)?] }
        }
        Op::Transpose { order } => {
            let [x] = take(operands)?;
            let mut sorted = order.clone();
            sorted.sort_unstable();
            if !sorted.iter().copied().eq(0..x.rank() as u32) {
                return Err(format!("{order:?} does not name each dimension of {x} once"));
            }
            let extents = order.iter().map(|axis| x.extents[*axis as usize]).collect();
            TensorType { element: x.element, extents }
        }
        Op::Reshape { extents } => {
            let [x] = take(operands)?;
            let to = TensorType { element: x.element, extents: extents.clone() };
            if to.elements() != x.elements() {
                return Err(format!("{x} can't be {to}: it has other elements"));
            }
            to
        }
        Op::Expand { extents } => {
            let [x] = take(operands)?;
            let to = TensorType { element: x.element, extents: extents.clone() };
            if broadcast(x, &to)? != *extents {
                return Err(format!("{x} can't be repeated to {to}"));
            }
            to
        }
        Op::Concat { axis } => concat(*axis, operands)?,
        Op::Slice { starts, ends, steps } => {
            let [x] = take(operands)?;
            let rank = x.rank();
            if [starts.len(), ends.len(), steps.len()] != [rank; 3] {
                return Err(format!("{x} has {rank} dimensions, each with a start, an end and a step"));
            }
            let extent = |axis: usize| {
                let (start, end, step) = (starts[axis], ends[axis], steps[axis]);
                if step == 0 || start >= end || end > x.extents[axis] {
                    return Err(format!("there is no {start}..{end} by {step} of dimension {axis} of {x}"));
                }
                Ok((end - start).div_ceil(step))
            };
            TensorType { element: x.element, extents: (0..rank).map(extent).collect::<Said<_>>()? }
        }
        Op::Pad { before, after } => {
            let [x] = take(operands)?;
            if [before.len(), after.len()] != [x.rank(); 2] {
                return Err(format!("{x} has {} dimensions, each padded before and behind", x.rank()));
            }
            let padded = |axis: usize| {
                let sum = x.extents[axis].checked_add(before[axis])?;
                sum.checked_add(after[axis])
            };
            let extents = (0..x.rank()).map(|axis| padded(axis).unwrap_or(u64::MAX));
            TensorType { element: x.element, extents: extents.collect() }
        }
        Op::Gather { axis } => {
            let [x, index] = take(operands)?;
            let axis = dimension(x, *axis)?;
            indices(index)?;
            let mut extents = x.extents.clone();
            extents.splice(axis..=axis, index.extents.iter().copied());
            TensorType { element: x.element, extents }
        }
        Op::GatherElements { axis } => {
            let [x, index] = take(operands)?;
            let axis = dimension(x, *axis)?;
            indices(index)?;
            let fits = |other: usize| other == axis || index.extents[other] <= x.extents[other];
            if index.rank() != x.rank() || !(0..x.rank()).all(fits) {
                return Err(format!("{index} reaches beyond {x} along other dimensions than {axis}"));
            }
            TensorType { element: x.element, extents: index.extents.clone() }
        }
        Op::ScatterRows { add } => {
            let [x, index, rows] = take(operands)?;
            dimension(x, 0)?;
            indices(index)?;
            alike(x, rows)?;
            if *add {
                numeric(x)?;
            }
            let mut expected = x.extents.clone();
            expected[0] = index.elements();
            if index.rank() != 1 || rows.extents != expected {
                return Err(format!("{rows} is not a row of {x} for each of {index}"));
            }
            x.clone()
        }
        Op::Reduce { axes, keep, .. } => {
            let [x] = take(operands)?;
            numeric(x)?;
            if axes.is_empty() || !axes.is_sorted_by(|a, b| a < b) {
                return Err(format!("{axes:?} are no dimensions in increasing order"));
            }
            dimension(x, axes[axes.len() - 1])?;
            let mut extents = Vec::new();
            for (axis, extent) in x.extents.iter().enumerate() {
                match axes.contains(&(axis as u32)) {
                    true if *keep => extents.push(1),
                    true => {}
                    false => extents.push(*extent),
                }
            }
            TensorType { element: x.element, extents }
        }
        Op::ArgMax { axis } => {
            let [x] = take(operands)?;
            numeric(x)?;
            let axis = dimension(x, *axis)?;
            let mut extents = x.extents.clone();
            extents[axis] = 1;
            TensorType { element: Element::I64, extents }
        }
        Op::CumSum { axis } => {
            let [x] = take(operands)?;
            numeric(x)?;
            dimension(x, *axis)?;
            x.clone()
        }
        Op::Softmax { axis } | Op::LogSoftmax { axis } => {
            let [x] = take(operands)?;
            floats(x)?;
            dimension(x, *axis)?;
            x.clone()
        }
        Op::LayerNorm { epsilon } => {
            let [x, weight, bias] = take(operands)?;
            floats(x)?;
            if !((*epsilon as f32).is_finite() && *epsilon >= 0.0) {
                return Err(format!("ε is {epsilon}; it is an f32, and at least 0"));
            }
            let row = x.extents.last().ok_or("a single number has no rows")?;
            for other in [weight, bias] {
                alike(x, other)?;
                if other.extents != [*row] {
                    return Err(format!("{other} is not one for each of a row of {x}"));
                }
            }
            x.clone()
        }
        Op::Quantize { axis } => {
            let [x, scale, zero] = take(operands)?;
            floats(x)?;
            alike(x, scale)?;
            scales(x, scale, zero, *axis)?;
            TensorType { element: zero.element, extents: x.extents.clone() }
        }
        Op::Dequantize { axis } => {
            let [x, scale, zero] = take(operands)?;
            floats(scale)?;
            alike(x, zero)?;
            scales(x, scale, zero, *axis)?;
            TensorType { element: scale.element, extents: x.extents.clone() }
        }
        Op::TopK { .. } => return Err("it gives two values".to_owned()),
    })
}

fn take<'a, const N: usize>(operands: &[&'a TensorType]) -> Said<[&'a TensorType; N]> {
    operands.try_into().map_err(|_| format!("it takes {N} values, and is given {}", operands.len()))
}

fn of(x: &TensorType, is: bool, what: &str) -> Said<()> {
    is.then_some(()).ok_or_else(|| format!("it takes {what}, and {x} is none"))
}

fn floats(x: &TensorType) -> Said<()> {
    of(x, x.element.is_float(), "floats")
}

fn numeric(x: &TensorType) -> Said<()> {
    of(x, x.element.is_float() || x.element.is_int(), "numbers")
}

fn indices(x: &TensorType) -> Said<()> {
    of(x, x.element.is_index(), "indices, i32 or i64,")
}

fn alike(a: &TensorType, b: &TensorType) -> Said<()> {
    if a.element != b.element {
        return Err(format!("{a} and {b} have different elements"));
    }
    Ok(())
}

fn dimension(x: &TensorType, axis: u32) -> Said<usize> {
    let axis = axis as usize;
    (axis < x.rank()).then_some(axis).ok_or_else(|| format!("{x} has no dimension {axis}"))
}

/// The extents of two arrays that are taken element by element.
fn broadcast(a: &TensorType, b: &TensorType) -> Said<Vec<u64>> {
    extents(&a.extents, &b.extents).ok_or_else(|| format!("{a} and {b} do not have the same extents"))
}

pub(crate) fn extents(a: &[u64], b: &[u64]) -> Option<Vec<u64>> {
    let rank = a.len().max(b.len());
    let of = |extents: &[u64], axis: usize| {
        let missing = rank - extents.len();
        if axis < missing { 1 } else { extents[axis - missing] }
    };
    let both = |axis| match (of(a, axis), of(b, axis)) {
        (a, b) if a == b => Some(a),
        (1, other) | (other, 1) => Some(other),
        _ => None,
    };
    (0..rank).map(both).collect()
}

fn mat_mul(operands: &[&TensorType]) -> Said<TensorType> {
    let [a, b] = take(operands)?;
    of(a, a.element.is_float() || a.element == Element::I32, "floats or i32")?;
    alike(a, b)?;
    let ([batch_a @ .., m, k], [batch_b @ .., rows, n]) = (&a.extents[..], &b.extents[..]) else {
        return Err(format!("{a} or {b} is no matrix"));
    };
    let batch = extents(batch_a, batch_b).filter(|_| k == rows);
    let mut extents = batch.ok_or_else(|| format!("there is no product of {a} and {b}"))?;
    extents.extend([m, n]);
    Ok(TensorType { element: a.element, extents })
}

fn images(x: &TensorType) -> Said<[u64; 4]> {
    x.extents[..].try_into().map_err(|_| format!("{x} has no channels of a height and a width"))
}

/// How many windows there are along a dimension. None of them is of padding alone.
fn windows(extent: u64, window: u64, dilation: u64, stride: u64, pads: [u64; 2]) -> Said<u64> {
    let no = || format!("windows of {window} do not go over {extent} elements by {stride}");
    if window == 0 || stride == 0 || dilation == 0 {
        return Err(no());
    }
    let reach = (window - 1).saturating_mul(dilation).saturating_add(1);
    if reach > MAX_WINDOW {
        return Err(format!("a window reaches over {reach} elements; it can over {MAX_WINDOW}"));
    }
    if pads.iter().any(|pad| *pad >= reach) {
        return Err("padding is less than a window".to_owned());
    }
    let room = (extent + pads[0] + pads[1]).checked_sub(reach).ok_or_else(no)?;
    Ok(room / stride + 1)
}

fn convolution(convolution: &Convolution, operands: &[&TensorType]) -> Said<TensorType> {
    let (x, weight, bias) = match *operands {
        [x, weight] => (x, weight, None),
        [x, weight, bias] => (x, weight, Some(bias)),
        _ => return Err(format!("it takes 2 or 3 values, and is given {}", operands.len())),
    };
    floats(x)?;
    alike(x, weight)?;
    let [n, channels, height, width] = images(x)?;
    let [out, in_group, rows, columns] = images(weight)?;
    let groups = convolution.groups;
    let divides = groups > 0 && out.is_multiple_of(groups) && in_group.checked_mul(groups) == Some(channels);
    if !divides {
        return Err(format!("{weight} does not convolve {x} in {groups} groups"));
    }
    if let Some(bias) = bias {
        alike(x, bias)?;
        if bias.extents != [out] {
            return Err(format!("{bias} is not one for each of {out} channels"));
        }
    }
    let along = |axis: usize, extent, window| {
        let Convolution { strides, pads, dilations, .. } = convolution;
        windows(extent, window, dilations[axis], strides[axis], pads[axis])
    };
    let extents = vec![n, out, along(0, height, rows)?, along(1, width, columns)?];
    Ok(TensorType { element: x.element, extents })
}

fn concat(axis: u32, operands: &[&TensorType]) -> Said<TensorType> {
    let [first, ..] = *operands else { return Err("it takes one value at least".to_owned()) };
    let axis = dimension(first, axis)?;
    let mut all = first.clone();
    for other in &operands[1..] {
        alike(first, other)?;
        let mut expected = first.extents.clone();
        if let Some(extent) = other.extents.get(axis) {
            expected[axis] = *extent;
        }
        if other.extents != expected {
            return Err(format!("{other} can't be put behind {first} along dimension {axis}"));
        }
        all.extents[axis] = all.extents[axis].saturating_add(other.extents[axis]);
    }
    Ok(all)
}

fn scales(x: &TensorType, scale: &TensorType, zero: &TensorType, axis: Option<u32>) -> Said<()> {
    let quantised = [Element::U8, Element::I8, Element::U16, Element::I16];
    let is_bias = zero.element == Element::I32;
    of(zero, quantised.contains(&zero.element) || is_bias, "u8, i8, u16, i16, or i32 (of biases),")?;
    let expected = match axis {
        Some(axis) => vec![x.extents[dimension(x, axis)?]],
        None => Vec::new(),
    };
    for other in [scale, zero] {
        if other.extents != expected {
            return Err(format!("{other} should have the extents {expected:?}"));
        }
    }
    Ok(())
}
