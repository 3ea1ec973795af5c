//! Arrays in FP8, with their scales.

use vm_graph::{Element, Reduction};

use super::{Draft, Drawn};
use crate::call::Function as _;
use crate::quantise::{Grain, Quantise, SIDE, greatest_of};

/// y = x / scale, where a scale is that of the greatest of its grain.
pub(crate) fn quantise(of: &Quantise) -> Drawn {
    let Quantise { rows, columns, grain, .. } = *of;
    let side = u64::from(SIDE);
    let mut g = Draft::of("quantise", of.buffers())?;
    let mut x = g.float("x")?;
    // Grains as whole tiles: rows of tiles, their rows, columns of tiles, their columns.
    let (height, width) = match grain {
        Grain::Rows => (1, columns),
        Grain::Lines => (1, side),
        Grain::Squares => (side, side),
    };
    let [down, across] = [rows.div_ceil(height), columns.div_ceil(width)];
    let all = [down * height, across * width];
    if all != [rows, columns] {
        x = g.pad(x, &[0, 0], &[all[0] - rows, all[1] - columns])?;
    }
    let x = g.reshape(x, &[down, height, across, width])?;
    let magnitudes = g.abs(x)?;
    let greatest = g.reduce(Reduction::Max, magnitudes, &[1, 3])?;
    let scales = g.times(greatest, 1.0 / greatest_of(of.output))?;
    let least = g.number(f32::MIN_POSITIVE.into())?;
    let mut scales = g.max(scales, least)?;
    // A runtime's maximum may leave NaN out.
    let ones = g.nan(x)?;
    let ones = g.cast(ones, Element::F32)?;
    let any = g.any(ones, &[1, 3])?;
    let nan = g.number(f64::NAN)?;
    scales = g.select(any, nan, scales)?;
    let y = g.div(x, scales)?;
    let mut y = g.reshape(y, &all)?;
    for (axis, (extent, all)) in (0..).zip([rows, columns].into_iter().zip(all)) {
        y = if extent < all { g.slice(y, axis, 0, extent)? } else { y };
    }
    g.put("y", y)?;
    // The scales of a column of tiles stand behind those of the one before.
    let scales = g.reshape(scales, &[down, across])?;
    let scales = g.turned(scales)?;
    g.put("scales", scales)?;
    g.finish()
}
