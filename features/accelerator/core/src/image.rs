//! Images on their way to a driver, for implementations: each is loaded once for all of its kernels.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::artifact::Artifact;
use crate::error::Result;

/// The modules that a queue has loaded, by the address of the image.
pub struct Images<M>(HashMap<usize, Image<M>>);

struct Image<M> {
    module: M,
    kernels: usize,
    /// As long as it is kept, no other image has the address.
    _artifact: Artifact,
}

impl<M> Default for Images<M> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

fn key(artifact: &Artifact) -> usize {
    artifact.image().as_ptr().addr()
}

impl<M> Images<M> {
    /// The module of a kernel's image, which `load` loads for the first of its kernels.
    ///
    /// # Errors
    /// Those of `load`.
    pub fn take(&mut self, artifact: &Artifact, load: impl FnOnce() -> Result<M>) -> Result<&M> {
        let image = match self.0.entry(key(artifact)) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                entry.insert(Image { module: load()?, kernels: 0, _artifact: artifact.clone() })
            }
        };
        image.kernels += 1;
        Ok(&image.module)
    }

    /// Releases what was taken for a kernel. With the last of its kernels the module is returned, to be unloaded.
    pub fn give(&mut self, artifact: &Artifact) -> Option<M> {
        let Entry::Occupied(mut entry) = self.0.entry(key(artifact)) else { return None };
        entry.get_mut().kernels -= 1;
        (entry.get().kernels == 0).then(|| entry.remove().module)
    }

    /// Takes out all modules.
    pub fn drain(&mut self) -> impl Iterator<Item = M> + '_ {
        self.0.drain().map(|(_, image)| image.module)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::artifact::Signature;
    use crate::error::Error;

    /// Two kernels of one image, and a kernel of another with the same bytes.
    fn artifacts() -> [Artifact; 3] {
        let of = |image: &Arc<[u8]>, entry: &str| {
            let signature = Signature {
                entry: entry.into(),
                block: [1; 3],
                cluster: 1,
                shared_bytes: 0,
                parameters: vec![],
                tiles: vec![],
                guarded: false,
                cost_bound: 1,
            };
            // SAFETY: it is never run.
            #[allow(unsafe_code)]
            unsafe { Artifact::new(Arc::clone(image), signature) }.unwrap()
        };
        let [one, other]: [Arc<[u8]>; 2] = [Arc::from(*b"image"), Arc::from(*b"image")];
        [of(&one, "a"), of(&one, "b"), of(&other, "a")]
    }

    #[test]
    fn an_image_is_loaded_with_its_first_kernel_and_unloaded_with_its_last() {
        let [a, b, other] = artifacts();
        let mut images = Images::default();
        let bad = || Err(Error::Stopped);
        assert_eq!(images.take(&a, bad), Err(Error::Stopped));
        assert_eq!(images.give(&a), None, "what failed to load is not there");
        assert_eq!(images.take(&a, || Ok(1)), Ok(&1));
        assert_eq!(images.take(&b, bad), Ok(&1));
        assert_eq!(images.take(&b.clone(), bad), Ok(&1));
        assert_eq!(images.take(&other, || Ok(2)), Ok(&2));
        assert_eq!([&a, &b].map(|artifact| images.give(artifact)), [None, None]);
        assert_eq!(images.give(&b), Some(1));
        assert_eq!(images.take(&b, || Ok(3)), Ok(&3), "it is loaded again");
        let mut rest: Vec<_> = images.drain().collect();
        rest.sort_unstable();
        assert_eq!(rest, [2, 3]);
        assert_eq!(images.give(&other), None);
    }
}
