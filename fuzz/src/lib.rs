//! What the fuzz targets share.

/// Makes a program a fuzz target. With the feature `libfuzzer` the fuzzer runs it; without, it runs once on each file that is
/// named on its command line, as on one that a fuzzer found.
#[macro_export]
macro_rules! target {
    (|$input:ident: $type:ty| $body:expr) => {
        #[cfg(feature = "libfuzzer")]
        libfuzzer_sys::fuzz_target!(|$input: $type| $body);

        #[cfg(not(feature = "libfuzzer"))]
        fn main() -> std::io::Result<()> {
            use libfuzzer_sys::arbitrary::{Arbitrary, Unstructured};
            for path in std::env::args_os().skip(1) {
                let bytes = std::fs::read(path)?;
                // Fewer bytes than it takes are no input, for the fuzzer either.
                if let Ok($input) = <$type>::arbitrary_take_rest(Unstructured::new(&bytes)) {
                    $body;
                }
            }
            Ok(())
        }
    };
}
