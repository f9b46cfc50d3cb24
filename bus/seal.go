package bus

import (
	"errors"
	"fmt"
	"strings"

	"github.com/nats-io/nkeys"
	"google.golang.org/protobuf/proto"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A SealKey is one side's curve key (an nkeys xkey): what is sealed to its
// public half, only its holder can read. Sealing or opening takes about 0.1 ms.
// It is safe for concurrent use.
type SealKey struct {
	pair   nkeys.KeyPair
	public string
}

// NewSealKey makes a fresh key. Replicas do so once per process.
func NewSealKey() (*SealKey, error) {
	pair, err := nkeys.CreateCurveKeys()
	if err != nil {
		return nil, fmt.Errorf("make a curve key: %w", err)
	}

	return sealKey(pair)
}

// ParseSealKey reads a key from its seed, as [SealKey.Seed] wrote it.
func ParseSealKey(seed []byte) (*SealKey, error) {
	pair, err := nkeys.FromCurveSeed(seed)
	if err != nil {
		return nil, errors.New("not the seed of a curve key (an nkeys seed that starts with SX)")
	}

	return sealKey(pair)
}

func sealKey(pair nkeys.KeyPair) (*SealKey, error) {
	public, err := pair.PublicKey()
	if err != nil {
		return nil, fmt.Errorf("public half of a curve key: %w", err)
	}

	return &SealKey{pair: pair, public: public}, nil
}

// ValidPublicKey returns an error unless a text is the public half of a [SealKey]. The
// error does not contain the text, which may be secret.
func ValidPublicKey(text string) error {
	const want = "want a public curve key: 56 characters that begin with X"
	switch {
	case nkeys.IsValidPublicCurveKey(text):
		return nil
	case strings.HasPrefix(text, "SX"):
		return errors.New("it is a seed, which is secret; " + want)
	default:
		return errors.New(want)
	}
}

// Public returns the public half.
func (k *SealKey) Public() string { return k.public }

// Seed returns the secret half, for storage.
func (k *SealKey) Seed() ([]byte, error) {
	seed, err := k.pair.Seed()
	if err != nil {
		return nil, fmt.Errorf("seed of a curve key: %w", err)
	}

	return seed, nil
}

// Seal makes a box of m that only the holder of recipient can open.
func (k *SealKey) Seal(m proto.Message, recipient string) (*driverv1.Sealed, error) {
	if !nkeys.IsValidPublicCurveKey(recipient) {
		return nil, Errorf(driverv1.Code_CODE_INVALID_ARGUMENT, "recipient %q is not a public curve key", recipient)
	}
	text, err := proto.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encode the message to seal: %w", err)
	}
	box, err := k.pair.Seal(text, recipient)
	if err != nil {
		return nil, fmt.Errorf("seal: %w", err)
	}

	return &driverv1.Sealed{Sender: k.public, Box: box}, nil
}

// Open reads a box into m. It fails unless the holder of sender sealed it for
// this key; the box's own word on its sender counts for nothing.
func (k *SealKey) Open(box *driverv1.Sealed, sender string, m proto.Message) error {
	text, err := k.pair.Open(box.GetBox(), sender)
	if err != nil {
		return fmt.Errorf("open a message sealed by key %s: %w", sender, err)
	}
	if err := proto.Unmarshal(text, m); err != nil {
		return fmt.Errorf("decode a sealed message: %w", err)
	}

	return nil
}
