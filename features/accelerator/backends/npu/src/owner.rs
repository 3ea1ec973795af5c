//! Whose files are loaded as code.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::NpuError;
use crate::runtime::collect;

/// Sees that nobody but `user` and root can have put the libraries below a folder there: theirs are the files, the folders, and those on
/// the way, and others may write to none of them. Gives the folder without links: what was looked at, and stays what it is, while a link on
/// the way to it may be another's, and lead elsewhere later.
///
/// # Errors
/// [`NpuError::Untrusted`], with the file.
pub(crate) fn check(folder: &Path, user: u32) -> Result<PathBuf, NpuError> {
    let no = |path: &Path, what: String| NpuError::Untrusted {
        path: path.to_owned(),
        what,
        folder: folder.to_owned(),
    };
    let real = folder.canonicalize().map_err(|error| no(folder, format!("can't be looked at: {error}")))?;
    let files = collect(&real, 3);
    let within = files.iter().flat_map(|file| file.ancestors().take_while(|path| *path != real));
    for path in real.ancestors().chain(within) {
        let looked = |data: io::Result<Metadata>| {
            data.map_err(|error| no(path, format!("can't be looked at: {error}")))
        };
        let (own, data) = (looked(path.symlink_metadata())?, looked(path.metadata())?);
        if let Some(other) = [own.uid(), data.uid()].into_iter().find(|owner| ![0, user].contains(owner)) {
            return Err(no(path, format!("belongs to user {other}")));
        }
        // In a folder like /tmp nobody removes or replaces what is another's; but anybody adds to it.
        let is_above = *path != *real && real.starts_with(path);
        let is_sticky = is_above && data.mode() & 0o1000 != 0;
        if data.mode() & 0o022 != 0 && !is_sticky {
            return Err(no(path, format!("can be written by others (mode {:o})", data.mode() & 0o7777)));
        }
    }
    Ok(real)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt as _, lchown, symlink};

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
        for path in &paths[2..] {
            set(path, 0o1777);
            assert!(said(own).is_some_and(|said| said.contains("mode 1777")), "{}", path.display());
            set(path, 0o755);
        }
        // A link leads where its folders are looked at, and what was looked at is loaded, wherever the link leads then.
        let link = root.path().join("link");
        symlink(root.path().join("cache"), &link).unwrap();
        assert_eq!(check(&link.join("onnxruntime"), own).unwrap(), folder.canonicalize().unwrap());
        // Links within are somebody's, too.
        let inner = folder.join("libonnxruntime.so");
        symlink("/proc/self/exe", &inner).unwrap();
        if own == 0 {
            lchown(&inner, Some(1), None).unwrap();
            assert!(said(own).is_some_and(|said| said.contains("belongs to user 1")), "{:?}", said(own));
        }
        fs::remove_file(&inner).unwrap();
        set(&root.path().join("cache"), 0o777);
        assert!(check(&root.path().join("link/onnxruntime"), own).is_err());
    }
}
