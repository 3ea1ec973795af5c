//! Extents that must be equal, among the arguments of a launch.

use crate::artifact::{Extent, Layout};
use crate::error::Result;
use crate::launch::{Arguments, refused};

impl Arguments {
    /// That extents which must be equal are.
    pub(crate) fn check_equal(&self, layout: &Layout) -> Result<()> {
        let parameters = &layout.signature.parameters;
        let extent = |index: u32, dimension: u32| {
            let slot = layout.params.slots.get(index as usize)?;
            self.words().get(slot.extent_offset(dimension)? as usize / 8).copied()
        };
        for (index, parameter) in (0..).zip(parameters) {
            for (dimension, wanted) in (0..).zip(parameter.kind.extents()) {
                let Extent::Same { parameter: first, dimension: at } = *wanted else { continue };
                let (found, wanted) = (extent(index, dimension), extent(first, at));
                if found != wanted {
                    let number = |extent: Option<u64>| extent.unwrap_or(0);
                    let first = parameters.get(first as usize).map_or("", |first| &first.name);
                    let reason = format!(
                        "extent {} of dimension {dimension} is not {}, which the view {first} has in dimension {at}",
                        number(found),
                        number(wanted)
                    );
                    return Err(refused(layout, &parameter.name, reason));
                }
            }
        }
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::artifact::{Extent, ParameterKind};
    use crate::extents::Extents;
    use crate::launch::tests::{artifact, memory};
    use crate::launch::{Arguments, QueueArgument};

    #[test]
    fn extents_that_must_be_equal_are() {
        let view =
            |extents| ParameterKind::View { extents, element: crate::Element::F32, align: 4, writes: false };
        let same = Extent::Same { parameter: 1, dimension: 1 };
        let number = ParameterKind::Scalar { bytes: 4, range: None };
        let product = vec![number, view(vec![Extent::Any; 2]), view(vec![same, Extent::Any])];
        let (artifact, memory) = (artifact(product, false), memory(0x1000, 0x1000));
        let check = |left: &[u64], right: &[u64], want: Option<&str>| {
            let part = |extents| QueueArgument::View(memory.region(), Extents::packed(extents).unwrap());
            let arguments = [QueueArgument::Scalar(1u32.into()), part(left), part(right)];
            let got = Arguments::new(&artifact, arguments).err().map(|error| error.to_string());
            assert_eq!(got.is_some(), want.is_some(), "{got:?}");
            assert!(got.as_deref().unwrap_or_default().contains(want.unwrap_or_default()), "{got:?}");
        };
        check(&[2, 3], &[3, 4], None);
        check(&[2, 0], &[0, 4], None);
        check(
            &[2, 3],
            &[4, 3],
            Some("p2: extent 4 of dimension 0 is not 3, which the view p1 has in dimension 1"),
        );
        check(&[3, 2], &[3, 2], Some("extent 3 of dimension 0 is not 2"));
    }
}
