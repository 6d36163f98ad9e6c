package scorer

import (
	"crypto/sha256"
	"encoding/binary"
)

// blockHashes returns vLLM's hashes of a prompt's whole blocks (prefix_caching_hash_algo sha256_cbor):
// SHA-256 of the canonical CBOR (RFC 8949) of (hash of the block before, token ids, null); before the first block
// stands the hash of the seed as text. Source: vllm/v1/core/kv_cache_utils.py.
func blockHashes(tokens []uint32, blockTokens int, seed string, most int) [][sha256.Size]byte {
	count := min(len(tokens)/blockTokens, most)
	hashes := make([][sha256.Size]byte, 0, count)
	before := sha256.Sum256(append(cborHead(nil, 3, uint64(len(seed))), seed...))
	encoded := make([]byte, 0, 64+5*blockTokens)
	for n := range count {
		encoded = cborHead(encoded[:0], 4, 3)
		encoded = append(cborHead(encoded, 2, sha256.Size), before[:]...)
		encoded = cborHead(encoded, 4, uint64(blockTokens))
		for _, token := range tokens[n*blockTokens : (n+1)*blockTokens] {
			encoded = cborHead(encoded, 0, uint64(token))
		}
		encoded = append(encoded, 0xf6)
		before = sha256.Sum256(encoded)
		hashes = append(hashes, before)
	}
	return hashes
}

// cborHead appends a major type with its argument in the shortest form.
func cborHead(data []byte, major byte, argument uint64) []byte {
	switch {
	case argument < 24:
		return append(data, major<<5|byte(argument))
	case argument < 1<<8:
		return append(data, major<<5|24, byte(argument))
	case argument < 1<<16:
		return binary.BigEndian.AppendUint16(append(data, major<<5|25), uint16(argument))
	case argument < 1<<32:
		return binary.BigEndian.AppendUint32(append(data, major<<5|26), uint32(argument))
	default:
		return binary.BigEndian.AppendUint64(append(data, major<<5|27), argument)
	}
}
