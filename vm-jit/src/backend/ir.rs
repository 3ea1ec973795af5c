//! The IR itself, for a host that compiles what it is sent: the code is the binary form of the module, and a kernel's symbol its
//! name. The host validates it as a guest's, and adds the guards and tensor maps that its accelerator needs; what that does not
//! have, it says itself. Nothing is rejected here.

use vm_ir::ValidModule;
use vm_ir::binary::{Lines, encode};

use crate::artifact::{Artifact, Entry, Format, layout};

/// The artifact of a module.
pub(crate) fn write(module: &ValidModule, target: String) -> Artifact {
    let entries = module.kernels().iter().map(|kernel| Entry {
        kernel: kernel.name().to_owned(),
        symbol: kernel.name().to_owned(),
        block: kernel.block(),
        cluster: kernel.cluster(),
        params: layout(kernel, &[], false),
        static_shared: 0,
        dynamic_shared: 0,
        work: u64::MAX,
        products: None,
    });
    Artifact { target, format: Format::Ir, code: encode(module, Lines::Keep), entries: entries.collect() }
}

#[cfg(test)]
mod tests {
    use vm_ir::{Trust, binary, text, validate};

    use crate::{Format, Target, compile, legal};

    #[test]
    fn a_module_comes_back_from_its_code() {
        let source = "vir 1
            kernel @first(@x: view<f16, [?, ?], read>, %n: i32, @y: view<f32, [?], write>) at 0x1 block(32, 2) cluster(2) {}
            kernel @second() at 0x2 block(1) {}";
        let module = text::parse(source).unwrap();
        let target: Target = "ir".parse().unwrap();
        assert_eq!(target.to_string(), "ir");
        for trust in [Trust::Guest, Trust::Trusted] {
            let valid = validate(module.clone(), trust).unwrap();
            let artifact = compile(&valid, &target).unwrap();
            assert_eq!((&*artifact.target, artifact.format), ("ir", Format::Ir));
            assert_eq!(binary::decode(&artifact.code).as_ref(), Ok(&module));
            let [first, second] = &artifact.entries[..] else { panic!("{:?}", artifact.entries) };
            assert_eq!((&*first.symbol, first.block, first.cluster), ("first", [32, 2, 1], 2));
            let offsets: Vec<_> = first.params.slots.iter().map(|slot| slot.offset()).collect();
            assert_eq!((&offsets[..], first.params.guard), (&[0, 32, 40][..], None));
            assert_eq!((&*second.symbol, second.params.bytes), ("second", 0));
        }
    }

    /// A tile kernel has its tensor maps where it is compiled.
    #[test]
    fn nothing_is_rejected() {
        let valid = validate(text::parse(crate::targets::TILE).unwrap(), Trust::Guest).unwrap();
        assert!(legal::rejects(&valid, &Target::Ir).is_empty());
        let artifact = compile(&valid, &Target::Ir).unwrap();
        assert!(artifact.entries[0].params.maps.is_empty());
    }
}
