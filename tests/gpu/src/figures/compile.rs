//! From IR to PTX.

use std::fmt::Write;
use std::hint::black_box;

use vm_ir::{Trust, ValidModule, text, validate};

use super::time;
use crate::Test;
use crate::table::{Aim, Figure};

pub(super) fn tests() -> Vec<Test> {
    vec![Test::new("IR to PTX", |gpu, report| {
        let target = gpu.target()?;
        for (name, module, aim) in
            [("one-line kernel", one_line(0)?, 0.2), ("kernel of 1,000 ops", thousand_ops()?, 3.0)]
        {
            let ours = time(200, 20, 1e3, || {
                vm_jit::compile(black_box(&module), &target)?;
                Ok(())
            })?;
            report.figure(Figure {
                name: format!("IR to PTX, {name}"),
                unit: "ms".into(),
                ours,
                peer: None,
                aim: Some(Aim::AtMost(aim)),
            });
        }
        Ok(())
    })]
}

/// `y = x · number`, so that each number makes a kernel that no cache has seen.
pub(super) fn one_line_text(number: u32) -> String {
    format!(
        "vir 1\nkernel @k(@x: view<f32, [?], read>, @y: view<f32, [?], write>) at 0x1000 block(256) {{\n  \
         %i = global_id.x : i64\n  %a = load @x[%i] : f32\n  %c = const {number}.5 : f32\n  %b = mul %a, %c : f32\n  \
         store @y[%i], %b\n}}\n",
    )
}

/// The same, as a guest's.
pub(super) fn one_line(number: u32) -> anyhow::Result<ValidModule> {
    Ok(validate(text::parse(&one_line_text(number))?, Trust::Guest)?)
}

fn thousand_ops() -> anyhow::Result<ValidModule> {
    let mut text = String::from(
        "vir 1\nkernel @k(@x: view<f32, [?], read>, @y: view<f32, [?], write>) at 0x1000 block(256) {\n  \
         %i = global_id.x : i64\n  %v0 = load @x[%i] : f32\n",
    );
    for n in 1..1000 {
        let op = ["add", "mul", "sub", "max"][n % 4];
        writeln!(text, "  %v{n} = {op} %v{}, %v{} : f32", n - 1, n / 2)?;
    }
    text.push_str("  store @y[%i], %v999\n}\n");
    Ok(validate(text::parse(&text)?, Trust::Guest)?)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_kernels_are_valid() {
        assert_ne!(super::one_line(1).unwrap(), super::one_line(2).unwrap());
        super::thousand_ops().unwrap();
    }
}
