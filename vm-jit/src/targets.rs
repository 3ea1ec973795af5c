//! The targets that there are, and what each has.

use crate::artifact::Format;
use crate::backend::{Target, amdgcn, ptx};
use crate::legal;
use vm_ir::{Module, text};

/// A target, with what the author of a kernel asks of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetInfo {
    /// The target, with its other options as they are unless said.
    pub target: Target,
    /// What its code is.
    pub format: Format,
    /// The version of PTX that is written; `None` where the code is none.
    pub ptx_version: Option<ptx::Version>,
    /// Bytes of shared memory that a block can have; `None` for a processor, where it is as much as scratch memory.
    pub shared_bytes: Option<u64>,
    /// Are there clusters of blocks?
    pub clusters: bool,
    /// Are there tile kernels?
    pub tiles: bool,
    /// Is it this machine's processor, `cpu` without a name?
    pub host: bool,
}

/// A kernel with a cluster.
const CLUSTER: &str = "vir 1
kernel @cluster() at 0x0 block(32) cluster(2) {
  shared @all: i32[2]
  %rank = cluster_rank : i32
  cluster.gather @all, %rank
}";

/// A kernel with a product of tiles.
pub(crate) const TILE: &str = "vir 1
kernel @tile(@a: view<bf16, [?, ?], read, align 16>, @c: view<f32, [?, ?], write, align 16>) at 0x0 tile(1) {
  channel @x: bf16[64, 64] stages 1
  channel @y: bf16[64, 64] stages 1
  fragment @sum: f32[64, 64]
  fetch @a[0, 0], @x
  fetch @a[0, 0], @y
  fill @sum, 0
  mma @sum, @x, @y
  release @x
  release @y
  put @c[0, 0], @sum
}";

/// Every target with a device of its own: GPUs from old to new, then processors.
pub fn targets() -> Vec<TargetInfo> {
    // What a target has, it says itself: by what it rejects.
    let (cluster, tile) = (text::parse(CLUSTER).ok(), text::parse(TILE).ok());
    let takes = |module: &Option<Module>, target: &Target| {
        module.as_ref().is_some_and(|module| legal::rejects(module, target).is_empty())
    };
    let info = |target: Target| {
        let (clusters, tiles) = (takes(&cluster, &target), takes(&tile, &target));
        match &target {
            Target::Ptx(options) => TargetInfo {
                format: Format::Ptx,
                ptx_version: Some(options.arch.preferred_version()),
                shared_bytes: Some(options.arch.shared_bytes()),
                clusters,
                tiles,
                host: false,
                target,
            },
            Target::Amdgcn(options) => TargetInfo {
                format: Format::LlvmIr,
                ptx_version: None,
                shared_bytes: Some(options.chip.shared_bytes()),
                clusters,
                tiles,
                host: false,
                target,
            },
            #[cfg(feature = "cpu")]
            Target::Cpu(options) => TargetInfo {
                format: Format::Elf,
                ptx_version: None,
                shared_bytes: None,
                clusters,
                tiles,
                host: crate::backend::cpu::Isa::host().is_ok_and(|host| host == options.isa),
                target,
            },
            Target::Ir => TargetInfo {
                format: Format::Ir,
                ptx_version: None,
                shared_bytes: None,
                clusters,
                tiles,
                host: false,
                target,
            },
        }
    };
    let gpus = ptx::Arch::all().map(|arch| Target::Ptx(ptx::Options::new(arch)));
    let gpus = gpus.chain(amdgcn::Chip::ALL.map(|chip| Target::Amdgcn(amdgcn::Options { chip })));
    #[cfg(feature = "cpu")]
    let gpus = gpus
        .chain(crate::backend::cpu::Isa::ALL.map(|isa| Target::Cpu(crate::backend::cpu::Options::new(isa))));
    gpus.map(info).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_ir::{Trust, validate};

    #[test]
    fn every_target_is_there_by_its_name() {
        for source in [CLUSTER, TILE] {
            validate(text::parse(source).unwrap(), Trust::Guest).unwrap();
        }
        let all = targets();
        for info in &all {
            assert_eq!(info.target.to_string().parse(), Ok(info.target.clone()));
        }
        let check = |name: &str, shared: Option<u64>, clusters: bool, tiles: Option<bool>| {
            let info = all.iter().find(|info| info.target.to_string() == name).expect(name);
            assert_eq!((info.shared_bytes, info.clusters), (shared, clusters), "{name}");
            assert!(tiles.is_none_or(|tiles| tiles == info.tiles), "{name}");
        };
        check("ptx:sm_70", Some(96 << 10), false, None);
        check("ptx:sm_80", Some(163 << 10), false, None);
        check("ptx:sm_90a", Some(227 << 10), true, Some(true));
        #[cfg(feature = "cpu")]
        check("cpu:aarch64", None, true, None);
        #[cfg(all(feature = "cpu", target_arch = "x86_64"))]
        assert_eq!(all.iter().filter(|info| info.host).count(), 1);
    }
}
