//! Modules to canonical text.

use crate::format::write_literal;
use crate::module::{Kernel, Module, Op, ParamKind, Region, Value, index_count};
use crate::op::Shape;
use std::fmt::Write;

/// The canonical text of a module.
pub fn print(module: &Module) -> String {
    let mut out = format!("vir {}\n", Module::VERSION);
    for kernel in &module.kernels {
        out.push('\n');
        out.push_str(&print_kernel(kernel));
    }
    out
}

/// The canonical text of one kernel, without the line that names the version.
pub fn print_kernel(kernel: &Kernel) -> String {
    let mut printer = Printer { kernel, out: String::new() };
    // Writing to a String does not fail.
    let _ = printer.kernel();
    printer.out
}

struct Printer<'k> {
    kernel: &'k Kernel,
    out: String,
}

impl Printer<'_> {
    fn kernel(&mut self) -> std::fmt::Result {
        let k = self.kernel;
        write!(self.out, "kernel @{}(", k.name)?;
        for (i, param) in k.params.iter().enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            match &param.kind {
                ParamKind::View(view) => write!(self.out, "{comma}@{}: {view}", param.name)?,
                ParamKind::Scalar { value, range } => {
                    write!(self.out, "{comma}%{}: {}", param.name, k.type_of(*value))?;
                    if let Some((least, greatest)) = range {
                        write!(self.out, " in [{least}, {greatest}]")?;
                    }
                }
            }
        }
        write!(self.out, ") at {} ", k.guest)?;
        match k.tile() {
            Some(tile) => write!(self.out, "tile({}", tile.groups)?,
            None => write!(self.out, "block({}", k.block[0])?,
        }
        if k.block[1..] != [1, 1] {
            write!(self.out, ", {}", k.block[1])?;
        }
        if k.block[2] != 1 {
            write!(self.out, ", {}", k.block[2])?;
        }
        self.out.push(')');
        if k.cluster != 1 {
            write!(self.out, " cluster({})", k.cluster)?;
        }
        if k.resident != 0 {
            write!(self.out, " resident({})", k.resident)?;
        }
        self.out.push_str(" {\n");
        for array in &k.shared {
            let dims: Vec<String> = array.dims.iter().map(u32::to_string).collect();
            writeln!(self.out, "  shared @{}: {}[{}]", array.name, array.element, dims.join(", "))?;
        }
        for array in &k.local {
            writeln!(self.out, "  local @{}: i8[{}]", array.name, array.len)?;
        }
        for c in k.tile().iter().flat_map(|tile| &tile.channels) {
            let [rows, columns] = c.dims;
            writeln!(
                self.out,
                "  channel @{}: {}[{rows}, {columns}] stages {}{}",
                c.name,
                c.element,
                c.stages,
                if c.multicast { " multicast" } else { "" }
            )?;
        }
        for f in k.tile().iter().flat_map(|tile| &tile.fragments) {
            let columns = f.columns.map(|columns| format!(", {columns}")).unwrap_or_default();
            writeln!(self.out, "  fragment @{}: {}[{}{columns}]", f.name, f.element, f.rows)?;
        }
        self.region(&k.body, 1)?;
        self.out.push_str("}\n");
        Ok(())
    }

    fn value(&mut self, value: Value) -> std::fmt::Result {
        match self.kernel.values.get(value.index()).and_then(|v| v.name.as_deref()) {
            Some(name) => write!(self.out, "%{name}"),
            None => write!(self.out, "%{}", value.0),
        }
    }

    fn values(&mut self, values: &[Value]) -> std::fmt::Result {
        for (i, value) in values.iter().enumerate() {
            if i > 0 {
                self.out.push_str(", ");
            }
            self.value(*value)?;
        }
        Ok(())
    }

    fn indent(&mut self, depth: usize) {
        for _ in 0..depth {
            self.out.push_str("  ");
        }
    }

    fn region(&mut self, region: &Region, depth: usize) -> std::fmt::Result {
        for op in &region.ops {
            self.indent(depth);
            self.op(op, depth)?;
        }
        if !region.yields.is_empty() {
            self.indent(depth);
            self.out.push_str("yield ");
            self.values(&region.yields)?;
            self.out.push('\n');
        }
        Ok(())
    }

    fn op(&mut self, op: &Op, depth: usize) -> std::fmt::Result {
        if !op.results.is_empty() {
            self.values(&op.results)?;
            self.out.push_str(" = ");
        }
        let row = op.code.info();
        self.out.push_str(row.mnemonic);
        for (kind, index) in row.attrs.iter().zip(op.attrs) {
            if kind.default() != Some(index) {
                write!(self.out, ".{}", kind.words().get(usize::from(index)).unwrap_or(&"?"))?;
            }
        }
        match row.shape {
            Shape::If => self.if_op(op, depth),
            Shape::For => self.for_op(op, depth),
            Shape::While => self.while_op(op, depth),
            Shape::Switch => self.switch_op(op, depth),
            Shape::Map => self.map(op, depth),
            _ => self.plain_op(op),
        }
    }

    fn plain_op(&mut self, op: &Op) -> std::fmt::Result {
        let indices = index_count(self.kernel, op).min(op.operands.len());
        let mut separator = " ";
        if let Some(place) = op.place {
            write!(self.out, " @{}", self.kernel.place_name(place))?;
            if !matches!(
                op.code.shape(),
                Shape::Extent
                    | Shape::Release
                    | Shape::Fill
                    | Shape::Mma
                    | Shape::Rows
                    | Shape::Share
                    | Shape::Send
            ) {
                self.out.push('[');
                self.values(&op.operands[..indices])?;
                self.out.push(']');
            }
            separator = ", ";
        }
        for other in &op.others {
            write!(self.out, "{separator}@{}", self.kernel.place_name(*other))?;
        }
        let rest = &op.operands[indices..];
        if !rest.is_empty() {
            self.out.push_str(separator);
            self.values(rest)?;
            separator = ", ";
        }
        for immediate in &op.immediates {
            self.out.push_str(separator);
            match (op.code.shape(), op.result()) {
                (Shape::Const, Some(result)) => {
                    let literal = write_literal(self.kernel.type_of(result).scalar(), *immediate);
                    self.out.push_str(&literal);
                }
                _ => write!(self.out, "{immediate}")?,
            }
            separator = ", ";
        }
        self.result_types(op)?;
        self.out.push('\n');
        Ok(())
    }

    fn map(&mut self, op: &Op, depth: usize) -> std::fmt::Result {
        let ([body], Some(place)) = (&op.regions[..], op.place) else { return Ok(()) };
        let computed = op.immediates.first().map_or(1, |count| *count as usize);
        for (i, place) in std::iter::once(&place).chain(&op.others).enumerate() {
            let before = match i {
                0 => " ",
                i if i == computed => " = ",
                _ => ", ",
            };
            write!(self.out, "{before}@{}", self.kernel.place_name(*place))?;
        }
        self.out.push_str(if op.others.len() < computed { " = (" } else { " (" });
        self.values(&body.args)?;
        self.out.push_str(") {\n");
        self.region(body, depth + 1)?;
        self.close(depth);
        self.out.push('\n');
        Ok(())
    }

    fn result_types(&mut self, op: &Op) -> std::fmt::Result {
        for (i, result) in op.results.iter().enumerate() {
            write!(self.out, "{}{}", if i == 0 { " : " } else { ", " }, self.kernel.type_of(*result))?;
        }
        Ok(())
    }

    fn close(&mut self, depth: usize) {
        self.indent(depth);
        self.out.push('}');
    }

    fn if_op(&mut self, op: &Op, depth: usize) -> std::fmt::Result {
        let [then, other] = &op.regions[..] else { return Ok(()) };
        self.out.push(' ');
        self.values(&op.operands)?;
        self.result_types(op)?;
        self.out.push_str(" {\n");
        self.region(then, depth + 1)?;
        self.close(depth);
        if !other.ops.is_empty() || !other.yields.is_empty() {
            self.out.push_str(" else {\n");
            self.region(other, depth + 1)?;
            self.close(depth);
        }
        self.out.push('\n');
        Ok(())
    }

    fn carried(&mut self, args: &[Value], initial: &[Value]) -> std::fmt::Result {
        if args.is_empty() {
            return Ok(());
        }
        self.out.push_str(" carry(");
        for (i, (arg, initial)) in args.iter().zip(initial).enumerate() {
            if i > 0 {
                self.out.push_str(", ");
            }
            self.value(*arg)?;
            write!(self.out, ": {} = ", self.kernel.type_of(*arg))?;
            self.value(*initial)?;
        }
        self.out.push(')');
        Ok(())
    }

    fn for_op(&mut self, op: &Op, depth: usize) -> std::fmt::Result {
        let ([body], [low, high, step, initial @ ..]) = (&op.regions[..], &op.operands[..]) else {
            return Ok(());
        };
        let [count, carried @ ..] = &body.args[..] else { return Ok(()) };
        self.out.push(' ');
        self.value(*count)?;
        write!(self.out, ": {} = ", self.kernel.type_of(*count))?;
        self.value(*low)?;
        self.out.push_str(" to ");
        self.value(*high)?;
        self.out.push_str(" step ");
        self.value(*step)?;
        if op.unroll() != 0 {
            write!(self.out, " unroll {}", op.unroll())?;
        }
        self.carried(carried, initial)?;
        self.out.push_str(" {\n");
        self.region(body, depth + 1)?;
        self.close(depth);
        self.out.push('\n');
        Ok(())
    }

    fn while_op(&mut self, op: &Op, depth: usize) -> std::fmt::Result {
        let [condition, body] = &op.regions[..] else { return Ok(()) };
        // The carried values are the first region's arguments, and the second sees them too.
        self.carried(&condition.args, &op.operands)?;
        self.out.push_str(" {\n");
        self.region(condition, depth + 1)?;
        self.close(depth);
        self.out.push_str(" do {\n");
        self.region(body, depth + 1)?;
        self.close(depth);
        self.out.push('\n');
        Ok(())
    }

    fn switch_op(&mut self, op: &Op, depth: usize) -> std::fmt::Result {
        self.out.push(' ');
        self.values(&op.operands)?;
        self.result_types(op)?;
        self.out.push_str(" {\n");
        for (i, region) in op.regions.iter().enumerate() {
            self.indent(depth + 1);
            match op.immediates.get(i) {
                Some(case) => writeln!(self.out, "case {} {{", *case as i64)?,
                None => self.out.push_str("default {\n"),
            }
            self.region(region, depth + 2)?;
            self.close(depth + 1);
            self.out.push('\n');
        }
        self.close(depth);
        self.out.push('\n');
        Ok(())
    }
}
