//! Whose files are loaded as code.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use crate::NpuError;
use crate::runtime::collect;

/// Sees that nobody but `user` and root can have put the libraries below a folder there: theirs are the files, the folders, and those on
/// the way, and others may write to none of them.
///
/// # Errors
/// [`NpuError::Untrusted`], with the file.
pub(crate) fn check(folder: &Path, user: u32) -> Result<(), NpuError> {
    let no = |path: &Path, what: String| NpuError::Untrusted {
        path: path.to_owned(),
        what,
        folder: folder.to_owned(),
    };
    let real = folder.canonicalize().map_err(|error| no(folder, format!("can't be looked at: {error}")))?;
    let mut files = Vec::new();
    collect(&real, 3, &mut files);
    let within = files.iter().flat_map(|file| file.ancestors().take_while(|path| *path != real));
    for path in real.ancestors().chain(within) {
        let data = path.metadata().map_err(|error| no(path, format!("can't be looked at: {error}")))?;
        if ![0, user].contains(&data.uid()) {
            return Err(no(path, format!("belongs to user {}", data.uid())));
        }
        // In a folder like /tmp nobody removes or replaces what is another's.
        let is_sticky = data.is_dir() && data.mode() & 0o1000 != 0;
        if data.mode() & 0o022 != 0 && !is_sticky {
            return Err(no(path, format!("can be written by others (mode {:o})", data.mode() & 0o7777)));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn only_what_nobody_else_can_have_put_there_is_loaded() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("cache/onnxruntime");
        let library = folder.join("a/libonnxruntime.so");
        fs::create_dir_all(library.parent().unwrap()).unwrap();
        fs::write(&library, "").unwrap();
        let own = root.path().metadata().unwrap().uid();
        let set = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        let said = |user| check(&folder, user).err().map(|error| error.to_string());
        let paths = [root.path(), &root.path().join("cache"), &folder, &folder.join("a"), &library];
        paths.iter().for_each(|path| set(path, 0o755));
        assert_eq!(said(own), None);
        // Files of root are loaded by everybody.
        let others = said(own + 1);
        assert_eq!(others.is_none(), own == 0, "{others:?}");
        assert!(others.is_none_or(|others| others.contains(&format!("belongs to user {own}"))));
        for path in paths {
            for mode in [0o775, 0o757] {
                set(path, mode);
                let said = said(own).unwrap();
                assert!(
                    said.contains(&format!("{} can be written by others (mode {mode:o})", path.display())),
                    "{said}"
                );
                assert!(said.contains("set VM_ONNXRUNTIME="), "{said}");
                set(path, 0o755);
            }
        }
        set(root.path(), 0o1777);
        assert_eq!(said(own), None, "like /tmp");
        // A link leads where its folders are looked at.
        std::os::unix::fs::symlink(root.path().join("cache"), root.path().join("link")).unwrap();
        set(&root.path().join("cache"), 0o777);
        assert!(check(&root.path().join("link/onnxruntime"), own).is_err());
    }
}
