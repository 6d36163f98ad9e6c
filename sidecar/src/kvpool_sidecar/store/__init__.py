"""Where blocks lie: one interface (`base`), a node's own drives (`local`), a shared directory (`shared`), memory."""
