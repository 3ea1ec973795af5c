//! Certificates, as an operator makes them.

use std::path::{Path, PathBuf};

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, date_time_ymd};

/// An authority, and what it signs, in a folder.
pub(crate) struct Authority {
    folder: PathBuf,
    name: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    pub(crate) fn new(folder: &Path, name: &str) -> Self {
        let mut parameters = CertificateParams::new(Vec::new()).expect("parameters");
        parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        parameters.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().expect("a key");
        let certificate = parameters.self_signed(&key).expect("a certificate");
        std::fs::write(folder.join(format!("{name}.pem")), certificate.pem()).expect("written");
        Self { folder: folder.into(), name: name.into(), issuer: Issuer::new(parameters, key) }
    }

    /// The file of its certificate.
    pub(crate) fn file(&self) -> PathBuf {
        self.folder.join(format!("{}.pem", self.name))
    }

    /// Signs a certificate for a name: its file, and that of its key.
    pub(crate) fn sign(&self, file: &str, name: &str, is_expired: bool) -> [PathBuf; 2] {
        let mut parameters = CertificateParams::new(vec![name.to_owned()]).expect("parameters");
        if is_expired {
            parameters.not_before = date_time_ymd(2001, 1, 1);
            parameters.not_after = date_time_ymd(2002, 1, 1);
        }
        let key = KeyPair::generate().expect("a key");
        let certificate = parameters.signed_by(&key, &self.issuer).expect("a certificate");
        let files = ["pem", "key"].map(|end| self.folder.join(format!("{file}.{end}")));
        for (path, text) in files.iter().zip([certificate.pem(), key.serialize_pem()]) {
            std::fs::write(path, text).expect("written");
        }
        files
    }
}
