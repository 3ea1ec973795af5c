//! Small kernels of every type, order and alignment, at sizes that no instruction has, against the interpreter.

use anyhow::{Context, ensure};
use vm_accel::{Launch, Limits};
use vm_ir::interp::{self, Argument, Tensor};
use vm_ir::{Scalar, Trust, text, validate};

use crate::Test;
use crate::arena::{Arena, Rows};
use crate::gpu::{Gpu, TIMEOUT, named};

pub(super) fn tests() -> Vec<Test> {
    vec![Test::new("odd tiles against the interpreter", |gpu, report| {
        report.note(format!("{} kernels", run(gpu)?));
        Ok(())
    })]
}

/// The types of factors, of what they are loaded from and of their sums.
const TYPES: [(&str, Scalar, &str); 7] = [
    ("f16", Scalar::F16, "f32"),
    ("bf16", Scalar::Bf16, "f32"),
    ("tf32", Scalar::F32, "f32"),
    ("f32", Scalar::F32, "f32"),
    ("f8e4m3", Scalar::F8E4M3, "f32"),
    ("f8e5m2", Scalar::F8E5M2, "f32"),
    ("i8", Scalar::I8, "i32"),
];
/// Rows, columns, what is added up, groups.
const SIZES: [[u32; 4]; 5] =
    [[40, 20, 24, 1], [64, 64, 64, 1], [16, 8, 16, 1], [72, 36, 52, 2], [96, 32, 40, 3]];
/// Where boxes begin.
const BEGINS: [[i64; 2]; 3] = [[0, 0], [-3, 9], [2, -17]];

/// A product of boxes, the greatest of each of its rows, and a product of it again where its elements are floats of 16 or 32 bits.
fn source(element: (&str, Scalar, &str), size: [u32; 4], [left, right]: [bool; 2], align: u32) -> String {
    let (ty, stored, sum) = element;
    let [rows, columns, inner, groups] = size;
    let align = if align == stored.bytes() { String::new() } else { format!(", align {align}") };
    let of_a = if left { [inner, rows] } else { [rows, inner] };
    let of_b = if right { [columns, inner] } else { [inner, columns] };
    let suffix = format!("{}{}", if left { ".at" } else { "" }, if right { ".bt" } else { "" });
    let (again, narrow) = match ty {
        "f16" | "bf16" => (true, format!("%n = fpconv %s : {ty}\n yield %n")),
        "f32" => (true, "yield %s".to_owned()),
        _ => (false, String::new()),
    };
    let mut heads = String::new();
    let mut body = String::new();
    if sum == "f32" {
        heads += &format!("fragment @most: f32[{rows}]\n");
        body += "fill @most, %least\n row.max @most, @sum\n put @m[%row], @most\n";
    }
    if again {
        heads += &format!(
            "channel @z: {ty}[{columns}, 24] stages 1\n fragment @narrow: {ty}[{rows}, {columns}]\n fragment @out: f32[{rows}, 24]\n"
        );
        body += &format!(
            "map @narrow = @sum (%i, %j, %s) {{\n {narrow}\n }}\n fetch @b[%column, %row], @z\n product @out, @narrow, @z\n release @z\n put @c[%row, %column], @out\n"
        );
    } else {
        body += "put @c[%row, %column], @sum\n";
    }
    format!(
        "vir 1
         kernel @odd(@a: view<{stored}, [?, ?], read{align}>, @b: view<{stored}, [?, ?], read{align}>, @c: view<{sum}, [?, ?], write>, @m: view<f32, [?], write>, %row: i64, %column: i64) at 0 tile({groups}) {{
         channel @x: {ty}[{}, {}] stages 2
         channel @y: {ty}[{}, {}] stages 1
         fragment @sum: {sum}[{rows}, {columns}]
         {heads}
         %least = const -3.0e38 : f32
         %zero = const 0 : i64
         fetch @a[%row, %column], @x
         fetch @b[%zero, %row], @y
         mma{suffix} @sum, @x, @y
         release @x
         release @y
         fetch @a[%zero, %zero], @x
         fetch @b[%column, %zero], @y
         mma{suffix} @sum, @x, @y
         release @x
         release @y
         {body}
         }}",
        of_a[0], of_a[1], of_b[0], of_b[1]
    )
}

/// Small integers, the same everywhere, whose sums are exact.
fn integers(seed: u64, element: Scalar, extents: [u64; 2]) -> Tensor {
    let mut state = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) % 3
    };
    let count = extents[0] * extents[1];
    match element {
        Scalar::I8 => Tensor::from_bits(element, &extents, (0..count).map(|_| next().wrapping_sub(1) & 0xff)),
        _ => Tensor::from_f64s(element, &extents, (0..count).map(|_| next() as f64 - 1.0)),
    }
}

fn run(gpu: &Gpu) -> anyhow::Result<usize> {
    let worker = gpu.worker()?;
    let mut kernels = 0;
    for (number, element) in TYPES.into_iter().enumerate() {
        let (ty, stored, sum) = element;
        for (n, [left, right]) in
            [[false, false], [false, true], [true, false], [true, true]].into_iter().enumerate()
        {
            let size = SIZES[(number + n) % SIZES.len()];
            let align = [16, stored.bytes(), 4.max(stored.bytes()), 8][(number + 2 * n) % 4];
            let source = source(element, size, [left, right], align);
            let context = || format!("{ty}, {size:?}, turned {left} {right}, align {align}");
            let module = validate(text::parse(&source).with_context(context)?, Trust::Guest)?;
            let compiled = gpu.compile(&module).with_context(context)?;
            let loaded = worker.load(named(&compiled, "odd")?.artifact())?;
            for (at, [row, column]) in BEGINS.into_iter().enumerate() {
                // Rows of as many bytes as are promised, and as a rule no more.
                let wide = |columns: u64| columns.next_multiple_of(u64::from(align / stored.bytes()));
                let a = integers(at as u64, stored, [67, wide(71)]);
                let b = integers(9 + at as u64, stored, [43, wide(61)]);
                let c = if sum == "i32" { Scalar::I32 } else { Scalar::F32 };
                let mut arguments: Vec<Argument> =
                    [a, b, integers(3, c, [75, 57])].map(Argument::Tensor).to_vec();
                arguments.push(Argument::Tensor(Tensor::zeros(Scalar::F32, &[150])));
                arguments.extend([row, column].map(|index| Argument::Bits(index as u64)));
                let mut wanted =
                    interp::Launch { kernel: "odd".into(), grid: [1; 3], arguments: arguments.clone() };
                interp::run(&module, &mut wanted, &interp::Limits::default()).with_context(context)?;
                for rows in [Rows::Packed, Rows::Apart] {
                    let launch = Launch::over(1).within(Limits::default());
                    let after = Arena::new(&arguments, rows)
                        .run(&worker, &loaded, &module.kernels()[0], launch)
                        .with_context(context)?;
                    for view in [2, 3] {
                        let of = |all: &[Argument]| all[view].tensor().map(Tensor::to_f64s);
                        let (found, wanted) = (of(&after), of(&wanted.arguments));
                        let different =
                            found.iter().flatten().zip(wanted.iter().flatten()).position(|(a, b)| a != b);
                        ensure!(
                            different.is_none(),
                            "{}, from {row}, {column}, rows {rows:?}, view {view}: element {different:?} differs",
                            context()
                        );
                    }
                }
            }
            kernels += 1;
        }
    }
    worker.stop(TIMEOUT)?;
    Ok(kernels)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_jit::Target;

    /// Every kernel is compiled for every architecture, but where it has no room.
    #[test]
    fn they_compile() {
        for (element, align) in TYPES.into_iter().flat_map(|element| [1, 4, 16].map(|align| (element, align)))
        {
            for size in SIZES {
                for turned in [[false, false], [false, true], [true, false], [true, true]] {
                    let source = source(element, size, turned, align.max(element.1.bytes()));
                    let module = validate(text::parse(&source).unwrap(), Trust::Guest).unwrap();
                    for arch in ["sm_70", "sm_75", "sm_80", "sm_89", "sm_90a", "sm_120"] {
                        let target: Target = format!("ptx:{arch}").parse().unwrap();
                        vm_jit::compile(&module, &target).unwrap();
                    }
                }
            }
        }
    }
}
