//! Matrix products with their epilogues.

use vm_graph::{Element, Reduction, Value};
use vm_ir::Scalar;

use super::activation::{self, silu};
use super::{Draft, Drawn, NoGraph};
use crate::call::Function as _;
use crate::flat;
use crate::gemm::{Activation, Auxiliary, Batch, Epilogue, Multiply, Product, Scales};

/// Elements that share a scale.
const BLOCK: u64 = 128;

/// C = f(α · A · B + β · C + bias). Rows that groups share out are multiplied by each group's matrix, of which their own is taken: where they end is known
/// only when it runs. tf32 is computed as f32.
pub(crate) fn product(of: &Multiply) -> Drawn {
    let Product { element, output, epilogue, .. } = of.product;
    let mut g = Draft::of("gemm", of.buffers())?;
    let is_integer = element == Scalar::I8;
    if is_integer && output == Scalar::I32 && epilogue != Epilogue::NONE {
        return Err(g.no("sums of i32 are stored as they are, without an epilogue"));
    }
    let [a, b] = factors(&mut g, &of.product)?;
    let mut sum = match of.product.batch {
        Batch::Grouped => grouped(&mut g, &of.product, a, b)?,
        Batch::One | Batch::Batched => g.mat_mul(a, b)?,
    };
    if is_integer && output == Scalar::I32 {
        g.put("c", sum)?;
        return g.finish();
    }
    sum = g.cast(sum, Element::F32)?;
    if epilogue.scales == Scales::Rows {
        let (of_rows, of_columns) = (g.float("a_scale")?, g.float("b_scale")?);
        let of_rows = g.reshape(of_rows, &[of.product.m, 1])?;
        sum = g.mul(sum, of_rows)?;
        sum = g.mul(sum, of_columns)?;
    }
    if epilogue.scaled {
        sum = g.times(sum, of.alpha.into())?;
    }
    if epilogue.plus {
        let before = g.float("c")?;
        let before = g.times(before, of.beta.into())?;
        sum = g.add(sum, before)?;
    }
    if let Some(bias) = g.float_if(epilogue.bias, "bias")? {
        sum = g.add(sum, bias)?;
    }
    let c = match epilogue.aux {
        Auxiliary::Gradient => {
            let aux = g.float("aux")?;
            let slope = match epilogue.activation {
                Activation::None => None,
                Activation::Relu => Some(flat::Activation::Relu),
                Activation::Silu => Some(flat::Activation::Silu),
                Activation::Gelu => Some(flat::Activation::Gelu),
            };
            let slope = slope.map(|of| activation::slope(&mut g, of, aux)).transpose()?;
            slope.map_or(Ok(sum), |slope| g.mul(sum, slope))?
        }
        aux => {
            if aux == Auxiliary::Store {
                g.put("aux", sum)?;
            }
            match epilogue.activation {
                Activation::None => sum,
                Activation::Relu => g.relu(sum)?,
                Activation::Silu => silu(&mut g, sum)?,
                Activation::Gelu => g.gelu(sum)?,
            }
        }
    };
    g.put("c", c)?;
    g.finish()
}

/// A and B as they are multiplied: not transposed, of f32 or i32, with the scales of their blocks.
fn factors(g: &mut Draft, product: &Product) -> Result<[Value; 2], NoGraph> {
    let Product { element, a_transposed, b_transposed, epilogue, m, n, k, .. } = *product;
    let mut factors = Vec::new();
    for (name, turned) in [("a", a_transposed), ("b", b_transposed)] {
        let x = match element {
            Scalar::I8 => {
                let x = g.given(name)?;
                g.cast(x, Element::I32)?
            }
            _ => g.float(name)?,
        };
        factors.push(if turned { g.turned(x)? } else { x });
    }
    let [mut a, mut b] = [factors[0], factors[1]];
    if epilogue.scales == Scales::Blocks {
        let parts = k.div_ceil(BLOCK);
        let (of_a, of_b) = (g.float("a_scale")?, g.float("b_scale")?);
        let of_a = g.turned(of_a)?;
        let of_a = spread(g, of_a, [m, parts], 1, k)?;
        a = g.mul(a, of_a)?;
        let of_b = spread(g, of_b, [parts, n.div_ceil(BLOCK)], 1, n)?;
        let of_b = spread(g, of_b, [parts, n], 0, k)?;
        b = g.mul(b, of_b)?;
    }
    Ok([a, b])
}

/// A matrix whose columns (`axis` 1), or rows, are each of 128, of which there are `count`.
fn spread(
    g: &mut Draft,
    x: Value,
    [rows, columns]: [u64; 2],
    axis: u32,
    count: u64,
) -> Result<Value, NoGraph> {
    let [one, many, all] = match axis {
        0 => [[rows, 1, columns], [rows, BLOCK, columns], [1, rows * BLOCK, columns]],
        _ => [[rows, columns, 1], [rows, columns, BLOCK], [1, rows, columns * BLOCK]],
    };
    let x = g.reshape(x, &one)?;
    let x = g.expand(x, &many)?;
    let x = g.reshape(x, &all[1..])?;
    Ok(g.slice(x, axis, 0, count)?)
}

/// Products of rows that belong to one matrix each.
fn grouped(g: &mut Draft, product: &Product, a: Value, b: Value) -> Result<Value, NoGraph> {
    let Product { m, matrices, .. } = *product;
    let offsets = g.given("offsets")?;
    let [first, end] = [0, 1].map(|from| {
        let part = g.slice(offsets, 0, from, from + matrices)?;
        g.reshape(part, &[matrices, 1, 1])
    });
    let (first, end) = (first?, end?);
    let rows = g.count_from(0, Element::I32, &[m, 1])?;
    let behind = g.greater_or_equal(rows, first)?;
    let before = g.less(rows, end)?;
    let own = g.and(behind, before)?;
    let products = g.mat_mul(a, b)?;
    let zero = g.number_like(products, 0.0)?;
    let products = g.select(own, products, zero)?;
    Ok(g.reduce_away(Reduction::Sum, products, &[0])?)
}
