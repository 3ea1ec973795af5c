//! Which way a tile kernel goes: by tensor maps and `wgmma`, or by the threads' registers ([`sync`]).

use super::layout::{self, Layout};
use super::{MAP_PROMISE, maps, sync};
use crate::artifact::{self, Instruction, Note, Products};
use crate::backend::ptx::Options;
use crate::backend::ptx::arch::Feature;
use crate::reject::RejectKind;
use std::fmt::Write as _;
use vm_ir::Kernel;
use vm_ir::op::Shape;
use vm_ir::tile::Tile;

/// The way of a kernel on a target, decided once for each of judging it and writing it.
#[derive(Debug)]
pub(in crate::backend::ptx) enum Way {
    /// By tensor maps and `wgmma`.
    Wgmma(Layout),
    /// By the threads' registers, and why not by `wgmma`; no reason where the target has none.
    Sync(Vec<Note>),
    /// By neither, and why.
    Neither(Vec<Note>),
}

impl Way {
    /// Where the target has all that [`Way::Wgmma`] takes, that is the way of what fits: views that promise what tensor maps need, and
    /// shapes that `wgmma` has.
    pub(in crate::backend::ptx) fn of(options: &Options, kernel: &Kernel, tile: &Tile) -> Way {
        // What is copied is handed over by `mbarrier.try_wait`, too, which came with clusters.
        let features = [Feature::Wgmma, Feature::Tma, Feature::SetMaxNReg, Feature::Cluster];
        let has = features.into_iter().all(|feature| options.has(feature));
        let layout = has.then(|| Layout::of(kernel, tile));
        let mut why = Vec::new();
        if let Some(layout) = layout {
            why = layout::rejects(kernel, tile, options.arch.shared_bytes());
            why.extend(unaligned(kernel, &layout));
            if why.is_empty() {
                return Way::Wgmma(layout);
            }
        }
        let against = sync::rejects(options, kernel, tile);
        if against.is_empty() {
            return Way::Sync(why);
        }
        let named = |way: &str, notes: Vec<Note>| -> Vec<Note> {
            let name = |Note { line, what }| Note { line, what: format!("by {way}: {what}") };
            notes.into_iter().map(name).collect()
        };
        Way::Neither(match has {
            true => [named("wgmma", why), named("mma.sync", against)].concat(),
            false => against,
        })
    }

    /// Why the target does not take the kernel.
    pub(in crate::backend::ptx) fn rejects(self) -> Vec<(u32, RejectKind)> {
        let Way::Neither(notes) = self else { return Vec::new() };
        notes.into_iter().map(|Note { line, what }| (line, RejectKind::Tile { what })).collect()
    }

    /// Bytes of the kernel's parameters.
    pub(in crate::backend::ptx) fn parameter_bytes(&self, kernel: &Kernel) -> u32 {
        let maps = if let Way::Wgmma(layout) = self { maps(layout) } else { Vec::new() };
        artifact::layout(kernel, &maps, true).bytes
    }
}

/// The views that no tensor map is made of, at the lines that declare them.
fn unaligned(kernel: &Kernel, layout: &Layout) -> Vec<Note> {
    let copied = |number: usize| layout.boxes.iter().any(|wanted| usize::from(wanted.parameter) == number);
    let params = kernel.params().iter().enumerate().filter(|(number, _)| copied(*number));
    params
        .filter_map(|(number, param)| {
            let align = kernel.view(u16::try_from(number).ok()?)?.align;
            (align < MAP_PROMISE).then(|| Note {
                line: param.line.0,
                what: format!(
                    "@{} promises multiples of {align} bytes alone for its address and its rows', a tensor map takes those of \
                     {MAP_PROMISE}; write `align {MAP_PROMISE}` if they are",
                    param.name
                ),
            })
        })
        .collect()
}

/// What multiplies in a kernel that goes by [`Way::Wgmma`], or with these reasons by [`Way::Sync`].
pub(super) fn products(options: &Options, kernel: &Kernel, instead: Option<&[Note]>) -> Products {
    let mut by = Vec::new();
    kernel.for_each_op(&mut |op| {
        let instruction = match (op.code.shape(), instead) {
            (Shape::Mma, None) => Some(Instruction::Wgmma),
            (Shape::Mma, Some(_)) => sync::instruction(options, kernel, op),
            _ => None,
        };
        by.extend(instruction.filter(|instruction| !by.contains(instruction)));
    });
    Products { by, fallback: instead.unwrap_or_default().to_vec() }
}

/// Writes what is told of a kernel's products ahead of it, as comments.
pub(super) fn comments(text: &mut String, products: &Products) {
    for Note { line, what } in &products.fallback {
        // A name ends no comment.
        let what = what.replace(|c: char| !(c == ' ' || c.is_ascii_graphic()), "_");
        let _ = writeln!(text, "// not by wgmma, line {line}: {what}");
    }
}
