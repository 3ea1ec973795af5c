//! When and how a guest's shared and local memory is zeroed, and where the blocks of a cluster meet behind that.

use super::asm::{Arg, Reg, def, ins, when};
use super::cluster::{ClusterBarriers, gathered_first};
use super::memory::WIDEST;
use super::writer::Writer;
use vm_ir::Scalar;
use vm_ir::module::{Op, Place, Region};
use vm_ir::op::Opcode;
use vm_ir::valid::Uniformity;

impl Writer<'_> {
    /// What is to be done before the first access to shared memory.
    pub(super) fn begin_shared(&mut self) {
        let kernel = self.kernel;
        // The blocks of a cluster meet behind it, and should do so early.
        let soon = kernel.cluster() > 1 && self.facts.shared_bytes <= u64::from(WIDEST * kernel.threads());
        if self.plan.zeroes_arrays() && !gathered_first(kernel) {
            match soon {
                true => self.zero_shared(),
                false => self.zero_at = self.zero_sites(kernel.body()).into_iter().collect(),
            }
            self.zeroes = true;
        }
        if kernel.cluster() > 1 {
            let mut cluster_barriers = ClusterBarriers::default();
            self.cluster_barriers(kernel.body(), &mut cluster_barriers);
            self.cluster_barriers = cluster_barriers;
            self.phase = (!self.cluster_barriers.is_empty()).then(|| self.number(Scalar::I32, 0));
        }
    }

    /// Where a guest's shared memory is zeroed: as late as all threads of the block are sure to come by together, so
    /// that what a kernel loads first is on its way by then. Before any access; and before any loop from which
    /// a thread may leave, for the threads zero it together.
    fn zero_sites(&self, region: &Region) -> Vec<*const Op> {
        let mut due = region.ops.iter().filter(|op| self.wants_zero(op));
        match (due.next(), due.next()) {
            (None, _) => Vec::new(),
            (Some(op), None)
                if op.code == Opcode::If && self.facts.steady(op.operands[0]) == Uniformity::Block =>
            {
                op.regions.iter().flat_map(|region| self.zero_sites(region)).collect()
            }
            (Some(op), _) => vec![std::ptr::from_ref(op)],
        }
    }

    fn wants_zero(&self, op: &Op) -> bool {
        self.plan.polls(op) || uses_shared(op)
    }

    /// Zeroes all shared arrays, the threads together.
    pub(super) fn zero_shared(&mut self) {
        let bytes: i64 = self.kernel.shared().iter().map(|a| a.bytes() as i64).sum();
        let start = self.shared.unwrap_or(Reg::NONE);
        let zero = self.number(Scalar::I32, 0);
        let index = self.local_index();
        let stride = i64::from(self.kernel.threads()) * i64::from(WIDEST);
        let quad = [zero; 4];
        let stores = bytes / stride;
        let at = def!(self, B32, "mad.lo.u32", index, i64::from(WIDEST), start);
        let store = "st.shared.v4.b32";
        if stores > 8 {
            let to = def!(self, B32, "add.s32", at, 0);
            let end = def!(self, B32, "add.s32", start, bytes);
            let (head, done) = (self.asm.new_label(), self.asm.new_label());
            self.asm.place(head);
            let over = def!(self, Pred, "setp.ge.u32", to, end);
            when!(self, over, true, "bra", Arg::Label(done));
            ins!(self, store, Arg::At(to, 0), Arg::List(&quad));
            ins!(self, "add.s32", to, to, stride);
            ins!(self, "bra.uni", Arg::Label(head));
            self.asm.place(done);
        } else {
            for index in 0..stores {
                ins!(self, store, Arg::At(at, index * stride), Arg::List(&quad));
            }
            let rest = bytes - stores * stride;
            if rest > 0 {
                let some = def!(self, Pred, "setp.lt.u32", index, rest / i64::from(WIDEST));
                when!(self, some, true, store, Arg::At(at, stores * stride), Arg::List(&quad));
            }
        }
        ins!(self, "bar.sync", 0);
    }

    /// Zeroes a thread's local arrays.
    pub(super) fn zero_local(&mut self) {
        /// The most stores that are written one behind the other.
        const STRAIGHT: u32 = 8;
        let (bytes, start) = (self.kernel.local_bytes() as u32, self.local.unwrap_or(Reg::NONE));
        let zero = self.number(Scalar::I32, 0);
        let quad = [zero; 4];
        let store = "st.local.v4.b32";
        if bytes <= STRAIGHT * WIDEST {
            for at in (0..bytes).step_by(WIDEST as usize) {
                ins!(self, store, Arg::At(start, i64::from(at)), Arg::List(&quad));
            }
            return;
        }
        let to = def!(self, B32, "add.s32", start, 0);
        let end = def!(self, B32, "add.s32", start, i64::from(bytes));
        let head = self.asm.new_label();
        self.asm.place(head);
        ins!(self, store, Arg::At(to, 0), Arg::List(&quad));
        ins!(self, "add.s32", to, to, i64::from(WIDEST));
        let more = def!(self, Pred, "setp.lt.u32", to, end);
        when!(self, more, true, "bra", Arg::Label(head));
    }

    /// Where a local array begins.
    pub(super) fn local_offset(&self, array: usize) -> u32 {
        self.kernel.local()[..array].iter().map(|array| array.bytes() as u32).sum()
    }
}

fn uses_shared(op: &Op) -> bool {
    matches!(op.place, Some(Place::Shared(_)))
        || op.regions.iter().any(|region| region.ops.iter().any(uses_shared))
}
